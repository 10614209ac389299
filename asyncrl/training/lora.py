"""LoRA: adapters of low rank in a frozen model, made by peft; and what leaves the trainer of them.

model directory -> load -> [adapters] -> fast linears, sharding -> actor; actor -> [published tensors] -> engine, export

Invariants:
1. Nothing but the adapters is trained: the base is frozen before the optimizer looks for parameters.
2. With its adapters off the policy is the model at `model.path`, to the bit: the reference needs no model of its own.
3. What is published merged, and what the engine merges itself, are the same numbers: one function makes both.

Names are those of the Hugging Face model; an adapter's are peft's, without that of the adapter (`algorithms/low_rank.py`).
Not covered: adapters of the embedding or the head; tensor parallel; a critic with adapters (it is trained whole).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from asyncrl.algorithms.low_rank import B_SUFFIX, adapted_weights, is_adapter, merged
from asyncrl.config import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.model_files import check_adapters
from asyncrl.training.disk import Disk
from asyncrl.wording import names_shown, nearest

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
SEED = 0
"""Of the first A. B is zero at first, so that no draw has a say in the first log-probs; and every rank must draw the same."""
_NAME = "default"
"""Of the adapter inside peft's layers."""


# --- in the model -----------------------------------------------------------------------------------------------------------------


def add_adapters(lm: "PreTrainedModel", config: ModelConfig) -> None:
    """Freeze the model and put an adapter beside each chosen linear layer, in place; nothing with lora_rank = 0.

    Raises ConfigError when peft is missing, and for a target that is no linear layer of the model.
    """
    if not config.lora_rank:
        return
    check_adapters(config)
    from peft import inject_adapter_in_model  # not before: it takes a tenth of a second, and most runs have no adapters

    settings = _settings(config, targets_of(lm, config.target_modules))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        inject_adapter_in_model(settings, lm, adapter_name=_NAME)


def plain_name(name: str) -> str:
    """Name of a parameter without what the injection has put into it."""
    if ".base_layer." in name:
        return name.replace(".base_layer.", ".")
    return name.replace(f".{_NAME}.weight", ".weight") if ".lora_" in name else name


@contextmanager
def adapters_off(policy: nn.Module) -> Iterator[None]:
    """Within it the policy computes what its frozen base does. For passes without gradient.

    peft's own switch freezes the adapters as well, and FSDP would take them for frozen for good when its first pass is this one.
    """
    from peft.tuners.lora import LoraLayer

    layers = [module for module in policy.modules() if isinstance(module, LoraLayer)]
    assert layers, "a policy without adapters would be its own reference"
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _settings(config: ModelConfig, targets: Sequence[str], *, base: str = "") -> "LoraConfig":
    from peft import LoraConfig

    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=list(targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base or None,
        inference_mode=bool(base),
    )


def targets_of(lm: "PreTrainedModel", asked: Sequence[str]) -> list[str]:
    """Last names of the layers that get an adapter. asked: `model.target_modules`.

    Raises ConfigError for a name that no linear layer below the head has.
    """
    head = lm.get_output_embeddings()  # type: ignore[no-untyped-call]
    linear = (name for name, module in lm.named_modules() if isinstance(module, nn.Linear) and module is not head)
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    if ALL_LINEAR in asked:
        return known
    for name in asked:
        if name not in known:
            raise ConfigError(
                f"model.target_modules: {name!r} is no linear layer of {type(lm).__name__} below its head{nearest(name, known)} "
                f"(there are {names_shown(known)}, and {ALL_LINEAR!r} for all of them)"
            )
    return list(asked)


# --- out of the model -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One tensor as the world outside sees it, and what it is made of.

    sources: names of the learner's parameters, to be gathered in this order; scale: of B, where it is among them.
    """

    name: str
    sources: tuple[str, ...]
    scale: float = 1.0

    def make(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor, of the shape and type of the first source; that source itself where nothing is to be computed."""
        if len(sources) == 1:
            return sources[0] if self.scale == 1.0 else sources[0] * self.scale
        weight_OI, a_RI, b_OR = sources
        return merged(weight_OI, a_RI, b_OR * self.scale)


def whole_model(names: Sequence[str], model: ModelConfig) -> list[Published]:
    """The weights of a model without adapters that computes the same. names: of the learner's parameters."""
    adapters = adapted_weights(names)
    scale = _scale(model)
    return [
        Published(name=name, sources=(name, *adapters[name]), scale=scale)
        if name in adapters
        else Published(name=name, sources=(name,))
        for name in names
        if not is_adapter(name)
    ]


def adapter_alone(names: Sequence[str], model: ModelConfig, *, scaled: bool) -> list[Published]:
    """A and B of every adapter. scaled: alpha / rank is multiplied into B, so that W + B A is all that is left to do."""
    scale = _scale(model) if scaled else 1.0
    return [
        Published(name=name, sources=(name,), scale=scale if name.endswith(B_SUFFIX) else 1.0) for name in names if is_adapter(name)
    ]


def to_publish(names: Sequence[str], model: ModelConfig) -> list[Published]:
    """What the engine gets at each version, by `model.lora_publish`; all weights as they are where there are no adapters."""
    as_adapter = model.lora_rank > 0 and model.lora_publish == "adapter"
    return adapter_alone(names, model, scaled=True) if as_adapter else whole_model(names, model)


def _scale(model: ModelConfig) -> float:
    return model.lora_alpha / model.lora_rank if model.lora_rank else 1.0


def export_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], model: ModelConfig, *, disk: Disk | None = None) -> None:
    """peft's own directory, for `peft.PeftModel.from_pretrained(base, folder)`. tensors: `adapter_alone(..., scaled=False)`."""
    disk = disk or Disk()
    targets = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in adapted_weights(tensors)})
    settings = _settings(model, targets, base=str(Path(model.path).resolve())).to_dict()  # type: ignore[no-untyped-call]
    disk.make_folder(folder)
    content = json.dumps(settings, indent=2, sort_keys=True, default=sorted)
    disk.write(folder / "adapter_config.json", content.encode())
    disk.write_tensors(folder / "adapter_model.safetensors", {f"base_model.model.{name}": one for name, one in tensors.items()})
    disk.sync_folder(folder)
