"""Adapters: what is trained, what the model computes with and without them, and what leaves the trainer."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModel

from asyncrl.algorithms.low_rank import merge_all
from asyncrl.config import ModelConfig, TrainRun
from asyncrl.errors import ConfigError
from asyncrl.protocol.ragged import values_of
from asyncrl.training.actor import Actor, Reference
from asyncrl.training.export import export_policy
from asyncrl.training.learners import open_learners
from asyncrl.training.lora import adapters_off, to_publish
from asyncrl.training.mesh import full_copy, open_mesh
from asyncrl.training.model import Policy, build_policy, load_model
from asyncrl.training.publication import gather
from asyncrl.training.token_batch import TokenBatch, token_batch

LORA = {"lora_rank": 2, "lora_alpha": 6}
ROWS = [(3, 5), (2, 9), (4, 7), (1, 6)]
GROUPS = ["a", "a", "b", "b"]


@pytest.fixture
def run(make_model: Callable[..., Path], make_run: Callable[..., TrainRun]) -> TrainRun:
    folder = make_model()
    return make_run(folder, model={"path": str(folder), **LORA})


@pytest.fixture
def trained(run: TrainRun, make_columns: Callable[..., Any]) -> Actor:
    """An actor after two updates."""
    actor = Actor(run)
    for seed in range(2):
        actor.update(make_columns(ROWS, seed=seed), GROUPS)
    return actor


def batch() -> TokenBatch:
    return token_batch([torch.tensor([1, 2, 3, 4, 5, 6])], [torch.ones(4, dtype=torch.bool)])


def log_probs(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy(batch())[0]  # type: ignore[no-any-return]


def published(actor: Actor, run: TrainRun, how: str) -> dict[str, torch.Tensor]:
    names = list(actor.learner.parameters)
    model = run.model.model_copy(update={"lora_publish": how})
    return gather(to_publish(names, model), actor.learner.parameters, actor.learner.mesh)


def test_the_first_policy_is_the_model_and_so_is_any_later_one_with_its_adapters_off(trained: Actor, run: TrainRun) -> None:
    plain = build_policy(run.model.model_copy(update={"lora_rank": 0}), open_mesh())
    want = log_probs(plain)
    assert torch.equal(log_probs(build_policy(run.model, open_mesh())), want)
    policy = trained.learner.module
    assert not torch.allclose(log_probs(policy), want, atol=1e-3)
    with adapters_off(policy):
        assert torch.equal(log_probs(policy), want)
    assert not torch.allclose(log_probs(policy), want, atol=1e-3)


def test_the_reference_is_the_actor_with_its_adapters_off(
    run: TrainRun, make_run: Callable[..., TrainRun], make_columns: Callable[..., Any]
) -> None:
    """It holds no model of its own, and says before and after updates what the model at the start does."""
    with_kl = make_run(Path(run.model.path), model=dict(LORA), actor={"use_kl_loss": True, "optim": {"lr": 0.01}})
    columns = make_columns(ROWS)
    learners = open_learners(with_kl)
    assert learners.reference is not None
    assert learners.reference._policy is learners.actor.learner.module
    plain = Reference(make_run(Path(run.model.path)))
    want = values_of(plain.log_probs(columns)[0])
    assert torch.equal(values_of(learners.reference.log_probs(columns)[0]), want)
    columns["ref_log_prob"] = learners.reference.log_probs(columns)[0]
    first, second = (learners.actor.update(columns, GROUPS) for _ in range(2))
    assert first["actor/kl_loss"] == 0 < second["actor/kl_loss"]
    assert torch.equal(values_of(learners.reference.log_probs(columns)[0]), want)
    assert not torch.allclose(values_of(learners.actor.log_probs(columns)[0]), want, atol=1e-3)


def test_the_adapters_come_back_on_after_an_error(trained: Actor) -> None:
    policy = trained.learner.module
    want = log_probs(policy)
    with pytest.raises(ZeroDivisionError), adapters_off(policy):
        raise ZeroDivisionError
    assert torch.equal(log_probs(policy), want)


def test_only_adapters_are_trained(trained: Actor, run: TrainRun) -> None:
    base = load_model(run.model).state_dict()
    learner = trained.learner
    assert set(learner.trained) == {name for name in learner.parameters if ".lora_" in name}
    assert len(learner.optimizer.state) == len(learner.trained) == 2 * 2 * 7
    weights = {name: full_copy(parameter) for name, parameter in learner.parameters.items() if name not in learner.trained}
    assert all(torch.equal(tensor, base[name]) for name, tensor in weights.items())


def test_every_actor_begins_with_the_same_adapters_and_leaves_the_generator_alone(run: TrainRun) -> None:
    torch.manual_seed(1)
    one = Actor(run).learner.parameters
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), drawn)
    other = Actor(run).learner.parameters
    assert all(torch.equal(parameter, other[name]) for name, parameter in one.items())


def test_whole_weights_and_merged_adapters_are_the_same_numbers_and_compute_what_the_policy_does(
    trained: Actor, run: TrainRun
) -> None:
    whole = published(trained, run, "merged")
    adapters = published(trained, run, "adapter")
    assert set(adapters) == set(trained.learner.trained)
    assert trained.snapshot(1).tensors.keys() == whole.keys()
    base = dict(load_model(run.model).named_parameters())
    merged = merge_all({**base, **adapters})
    assert merged.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in merged.items())
    engine = load_model(run.model)
    engine.load_state_dict(whole, strict=False)
    torch.testing.assert_close(log_probs(Policy(engine)), log_probs(trained.learner.module), atol=1e-5, rtol=0)


def test_an_export_loads_as_any_model_and_its_adapter_with_peft(trained: Actor, run: TrainRun, tmp_path: Path) -> None:
    export_policy(trained.learner, tmp_path / "hf", run.model)
    want = log_probs(trained.learner.module)
    whole = load_model(ModelConfig(path=str(tmp_path / "hf")))
    torch.testing.assert_close(log_probs(Policy(whole)), want, atol=1e-5, rtol=0)
    adapted = PeftModel.from_pretrained(load_model(run.model), str(tmp_path / "hf" / "adapter"))
    adapted.train(False)
    torch.testing.assert_close(log_probs(Policy(cast("Any", adapted.get_base_model()))), want, atol=1e-5, rtol=0)
    settings = json.loads((tmp_path / "hf" / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (2, 6)
    assert settings["base_model_name_or_path"] == str(Path(run.model.path).resolve())
    assert len(settings["target_modules"]) == 7


def test_chosen_layers_alone_get_an_adapter(make_model: Callable[..., Path]) -> None:
    config = ModelConfig(path=str(make_model()), lora_rank=2, target_modules=["q_proj", "v_proj"])
    policy = build_policy(config, open_mesh())
    names = [policy.hf_name(name) for name, parameter in policy.named_parameters() if parameter.requires_grad]
    assert names == [
        f"model.layers.{layer}.self_attn.{target}.lora_{half}.weight"
        for layer in (0, 1)
        for target in ("q_proj", "v_proj")
        for half in "AB"
    ]


@pytest.mark.parametrize(("target", "nearest"), [("q_prog", "q_proj"), ("lm_head", "did|there"), ("gate", "gate_proj")])
def test_a_target_that_is_no_layer_is_refused_with_the_nearest(make_model: Callable[..., Path], target: str, nearest: str) -> None:
    config = ModelConfig(path=str(make_model()), lora_rank=2, target_modules=["v_proj", target])
    with pytest.raises(ConfigError, match=f"model.target_modules: '{target}'.*({nearest})"):
        build_policy(config, open_mesh())


def test_no_peft_is_said_in_one_line(make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"model.lora_rank = 2 needs peft.*pip install 'asyncrl\[lora\]'"):
        build_policy(ModelConfig(path=str(make_model()), lora_rank=2), open_mesh())
