"""Adapters cut over ranks: the same training as in one process, whatever is published and wherever the reference is asked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.distributed.tensor import DTensor

from asyncrl.algorithms.low_rank import is_adapter
from asyncrl.cluster import Rank
from asyncrl.config import TrainRun
from asyncrl.ports import Topology
from asyncrl.protocol.ragged import from_values, lengths_of, offsets_of, values_of
from asyncrl.training.learners import Learners, open_learners
from asyncrl.training.mesh import open_mesh

ROWS = [(3, 5), (2, 9), (4, 7), (1, 6)]
GROUPS = ["a", "a", "b", "b"]
SHARDS = {1: (), 2: (((0, 3),), ((1, 2),))}

Columns = dict[str, tuple[torch.Tensor, torch.Tensor]]


def _packed(columns: TensorDict) -> Columns:
    """(values, offsets) a column: a process is sent no ragged tensors."""
    return {str(name): (values_of(columns[name]), offsets_of(lengths_of(columns[name]))) for name in columns.keys()}  # noqa: SIM118


def _train(learners: Learners, columns: TensorDict, world: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(what is published after two updates under a KL term, log-probs of the reference then, 0 in rows of other ranks)."""
    reference, shards = learners.reference, SHARDS[world]
    assert reference is not None
    for _ in range(2):
        columns["ref_log_prob"] = reference.log_probs(columns, shards)[0]
        learners.actor.update(columns, GROUPS, shards=shards)
    return dict(learners.snapshot(1).tensors), values_of(reference.log_probs(columns, shards)[0])


def train_on_rank(rank: Rank, payload: tuple[TrainRun, Columns]) -> tuple[dict[str, torch.Tensor], torch.Tensor, int]:
    """And how many entries of parameters this rank holds."""
    run, packed = payload
    columns = TensorDict({name: from_values(*pair) for name, pair in packed.items()}, batch_size=[len(ROWS)])
    learners = open_learners(run, open_mesh(Topology(world=rank.world)))
    cut = [parameter for parameter in learners.actor.learner.parameters.values() if isinstance(parameter, DTensor)]
    return *_train(learners, columns, rank.world), sum(parameter.to_local().numel() for parameter in cut)


@pytest.mark.ranks
@pytest.mark.parametrize("publish", ["merged", "adapter"])
def test_one_and_two_ranks_train_the_adapters_that_one_process_does(
    run_on_ranks: Callable[..., list[Any]],
    make_model: Callable[..., Path],
    make_run: Callable[..., TrainRun],
    make_columns: Callable[..., TensorDict],
    publish: str,
) -> None:
    folder = make_model()
    model = {"path": str(folder), "lora_rank": 3, "lora_publish": publish, "dtype": "float64"}
    run = make_run(folder, model=model, actor={"use_kl_loss": True, "kl_loss_coef": 0.1, "optim": {"lr": 0.01}})
    columns = make_columns(ROWS)
    want, want_reference = _train(open_learners(run), columns, 1)
    assert all(map(is_adapter, want)) == (publish == "adapter")
    held = []
    for world in (1, 2):
        replies = run_on_ranks(world, train_on_rank, (run, _packed(make_columns(ROWS))))
        tensors = replies[0][0]
        assert [len(reply[0]) for reply in replies[1:]] == [0] * (world - 1)
        assert tensors.keys() == want.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, want[name], rtol=0, atol=1e-8)
        torch.testing.assert_close(sum(reply[1] for reply in replies), want_reference, rtol=0, atol=1e-8)
        held.append([reply[2] for reply in replies])
    assert max(held[1]) < 0.6 * held[0][0], "two ranks hold a half each, the frozen base as well"
