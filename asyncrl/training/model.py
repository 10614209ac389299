"""A Hugging Face causal LM from a local folder, and the wrapper that gives log-probs of chosen tokens instead of all logits.

Place: model directory -> [model] -> actor, reference, warm start. Dropout is off always (`eval()`): the trainer's log-probs must be
those of the distribution that the engine sampled from.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as hf_logging

from asyncrl.algorithms.token_log_probs import head_log_probs, head_sum_pi_squared
from asyncrl.config import FSDPConfig, ModelConfig
from asyncrl.errors import ModelError
from asyncrl.training.linear import use_fast_linears
from asyncrl.training.lora import add_adapters, plain_name
from asyncrl.training.mesh import Mesh
from asyncrl.training.norms import use_wide_norms
from asyncrl.training.placement import PACKED_ATTENTION, Part, Placement, checkpoint_layers, place
from asyncrl.training.sharding import shard
from asyncrl.training.token_batch import TokenBatch
from asyncrl.wording import named_message_of, names_shown

_READING = threading.Lock()
"""Of the library's loader, which changes torch for all threads while it works: two at once lose weights."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

_FSDP = FSDPConfig()
_HERE = Placement()


def load_model(config: ModelConfig, *, key: str = "model.path") -> PreTrainedModel:
    """The causal LM at `config.path`, in eval mode, with every weight of `config.dtype`. key: what names it to the user.

    Raises ModelError, one line, when the folder is missing, a file is broken, weights are missing or of other shapes, or the model
    computes its logits otherwise than head(hidden states), which log-probs of chosen tokens rely on.
    """
    folder = Path(config.path)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{key} = {config.path!r} is no model directory: it has no config.json")
    model = _read(folder, config, key)
    model.train(False)
    _check_head(model, f"{key} = {config.path!r}")
    return model


def _read(folder: Path, config: ModelConfig, key: str) -> PreTrainedModel:
    try:
        with _READING, _quiet():
            settings = AutoConfig.from_pretrained(folder, local_files_only=True)
            loaded: tuple[PreTrainedModel, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
                folder,
                config=settings,
                dtype=_DTYPES[config.dtype],
                # packed rows are the trainer's; here, on CPU, the model is loaded and looked at
                attn_implementation="sdpa" if config.attn_implementation in PACKED_ATTENTION else config.attn_implementation,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below, in one line
            )  # type: ignore[assignment]
    # Whatever a broken folder makes the library raise is the user's folder, said in one line.
    except Exception as error:
        raise ModelError(f"{key} = {config.path!r} cannot be loaded: {named_message_of(error)}") from error
    model, report = loaded
    if missing := sorted(map(str, report["missing_keys"])):
        raise ModelError(f"{key} = {config.path!r} lacks weights: {names_shown(missing, limit=3)}")
    if mismatched := sorted(report["mismatched_keys"], key=str):
        name, stored, wanted = mismatched[0]
        raise ModelError(
            f"{key} = {config.path!r} has weights of other shapes than its config.json says: {name} is {list(stored)} instead "
            f"of {list(wanted)} ({len(mismatched)} in all)"
        )
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """The library's bar would break ours, and its tables of what is wrong with the weights are a line of ours."""
    verbosity = hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    hf_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)


def _check_head(model: PreTrainedModel, where: str) -> None:
    """Logit caps, scales and the like would silently make other log-probs than the model's: compare on four tokens."""
    ids = torch.arange(4)[None] % model.config.get_text_config().vocab_size
    head = _head(model)
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{where}: its head is {type(head).__name__}, not a linear layer; use another model")
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        parts = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    if not torch.allclose(whole, parts, rtol=1e-3, atol=1e-3):
        raise ModelError(f"{where}: {type(model).__name__} changes its logits after the head; use another model")


class Wrapper(nn.Module, ABC):
    """A model from the library inside a module of ours, which computes what training needs of it.

    Batches and results are on CPU, and results are of all policy tokens of the batch, wherever and however the model computes.
    """

    placement: Placement

    @abstractmethod
    def hf_name(self, name: str) -> str:
        """Parameter name inside this module to Hugging Face's."""

    @abstractmethod
    def config_json(self) -> str:
        """The config.json with which its parameters load as a Hugging Face model."""


class Policy(Wrapper):
    """Log-probs and entropies of chosen tokens. The head runs inside this module's forward, where FSDP has gathered its weight."""

    def __init__(self, lm: PreTrainedModel, placement: Placement = _HERE) -> None:
        super().__init__()
        self.lm = lm
        self.placement = placement

    def forward(
        self, batch: TokenBatch, temperature: float = 1.0, entropy_gradient: bool = False, with_squares: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """(log_probs_n, entropy_n), float32, of `batch.labels_n` under softmax(logits / temperature).

        The entropy carries a gradient only when asked. with_squares: and the sum of squared probabilities, which has no gradient
        and costs a second product with the head.
        """
        part = self.placement.part(batch)
        hidden_nH = hidden_states(self.lm.base_model, part)
        head = cast("nn.Linear", _head(self.lm))
        found: tuple[torch.Tensor, ...] = head_log_probs(
            hidden_nH,
            head.weight,
            part.tokens.labels_n,
            bias_V=head.bias,
            temperature=temperature,
            entropy_gradient=entropy_gradient,
        )
        if with_squares:
            found = (*found, head_sum_pi_squared(hidden_nH, head.weight, bias_V=head.bias, temperature=temperature))
        return tuple(part.whole(values_n) for values_n in found)

    def hf_name(self, name: str) -> str:
        return plain_name(name.removeprefix("lm."))

    def config_json(self) -> str:
        return self.lm.config.to_json_string()


def hidden_states(backbone: nn.Module, part: Part) -> torch.Tensor:
    """[n, H]: what a head turns into the next token's logits, or into its value, at the positions that predict policy tokens."""
    hidden_nH: torch.Tensor = backbone(**part.inputs).last_hidden_state.flatten(0, 1)[part.tokens.select_n]
    return hidden_nH


def build_policy(config: ModelConfig, mesh: Mesh, fsdp: FSDPConfig = _FSDP, *, key: str = "model.path") -> Policy:
    """`load_model` wrapped, cut and sharded over the mesh. Raises ModelError and ConfigError for what cannot be."""
    lm = load_model(config, key=key)
    add_adapters(lm, config)
    policy = Policy(lm, prepare(lm, mesh, config))
    shard(policy, decoder_layers(lm), mesh, fsdp)
    return policy


def prepare(lm: PreTrainedModel, mesh: Mesh, config: ModelConfig) -> Placement:
    """Everything that is done to a loaded model before it is sharded, in place. Raises as `place` does."""
    placement = place(lm, mesh, config)
    use_fast_linears(lm)
    use_wide_norms(lm)
    if config.enable_gradient_checkpointing:
        checkpoint_layers(decoder_layers(lm))
    return placement


def _head(lm: PreTrainedModel) -> nn.Module | None:
    head: nn.Module | None = lm.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head


def decoder_layers(lm: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, by the class names that the model says must not be split."""
    names = set(lm._no_split_modules or ())
    return [module for module in lm.modules() if type(module).__name__ in names]
