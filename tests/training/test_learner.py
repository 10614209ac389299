"""The learner on one rank: gradients are sums, the clip is torch's, and a step wants its last micro-batch told."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from asyncrl.config import ModelConfig, OptimConfig
from asyncrl.training.gradients import groups_by_mesh, scale, total_norm
from asyncrl.training.learner import Learner
from asyncrl.training.mesh import full_copy, gather_objects, open_mesh
from asyncrl.training.model import Policy, build_policy
from asyncrl.training.token_batch import token_batch


@pytest.fixture
def learner(make_model: Callable[..., Path]) -> Learner[Policy]:
    mesh = open_mesh()
    policy = build_policy(ModelConfig(path=str(make_model())), mesh)
    policy.lm.get_parameter("model.norm.weight").requires_grad_(False)
    return Learner(policy, mesh, OptimConfig(lr=0.1, clip_grad=0.5), total_updates=0)


def _loss(learner: Learner[Policy]) -> torch.Tensor:
    rows = [torch.arange(7), torch.arange(3, 12)]
    log_probs: torch.Tensor = learner.module(token_batch(rows, [torch.ones(4, dtype=torch.bool)] * 2))[0]
    return log_probs.sum()


def test_frozen_parameters_are_known_and_stay(learner: Learner[Policy]) -> None:
    before = {name: full_copy(tensor) for name, tensor in learner.parameters.items()}
    learner.backward(_loss(learner))
    learner.step(str)
    moved = {name for name, tensor in learner.parameters.items() if not torch.equal(before[name], full_copy(tensor))}
    assert moved == learner.trained.keys() == learner.parameters.keys() - {"model.norm.weight"}
    assert "model.norm.weight" in learner.parameters


def test_the_norm_and_the_clip_are_torchs(learner: Learner[Policy]) -> None:
    learner.backward(_loss(learner))
    whole = [full_copy(parameter.grad) for parameter in learner.trained.values() if parameter.grad is not None]
    assert total_norm(whole) == pytest.approx(float(nn.utils.get_total_norm(whole)), rel=1e-6)
    seen: list[torch.Tensor] = []
    learner.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(full_copy(parameter.grad) for parameter in learner.trained.values() if parameter.grad is not None)
    )
    report = learner.step(str)
    assert report.grad_norm == pytest.approx(total_norm(whole), rel=1e-6)
    assert report.grad_norm > 0.5
    assert total_norm(seen) == pytest.approx(0.5, rel=1e-4)


def test_a_step_wants_to_know_its_last_micro_batch(learner: Learner[Policy]) -> None:
    learner.backward(_loss(learner), is_last=False)
    with pytest.raises(AssertionError, match="not told to be the last"):
        learner.step(str)


def test_weights_written_from_outside_are_seen_by_the_next_pass(learner: Learner[Policy]) -> None:
    """A pass without gradient leaves the gathered embedding behind."""
    with torch.no_grad():
        before = _loss(learner)
        for parameter in learner.parameters.values():
            parameter.mul_(1.5)
        learner.set_counters({"updates": 3, "skipped_updates": 1, "skipped_in_a_row": 0})
        after = _loss(learner)
    assert float(before) != float(after)
    assert learner.counters() == {"updates": 3, "skipped_updates": 1, "skipped_in_a_row": 0}


def test_gradients_are_scaled_in_place_and_numbers_are_not_sent_where_one_is_alone() -> None:
    gradients = [torch.ones(3), torch.full((2, 2), -2.0)]
    scale(gradients, 0.5)
    assert [gradient.flatten().tolist() for gradient in gradients] == [[0.5] * 3, [-1.0] * 4]
    assert len(groups_by_mesh([nn.Parameter(gradient) for gradient in gradients])) == 1
    assert gather_objects({"a": 1}, open_mesh()) == [{"a": 1}]
