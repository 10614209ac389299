"""Checkpoints of many ranks: any layout reads what any other wrote, to the bit; a rank that dies costs nothing that is whole."""

import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncrl.cluster import Rank
from asyncrl.config import TrainRun, topology_of
from asyncrl.errors import RankDiedError
from asyncrl.training.checkpoint import Checkpoint, Counters, find_checkpoints, open_checkpoint, save_checkpoint
from asyncrl.training.disk import Disk
from asyncrl.training.learners import Learners, open_learners
from asyncrl.training.mesh import full_copy, open_mesh

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

MakeModel = Callable[..., Path]
MakeRun = Callable[..., TrainRun]
MakeColumns = Callable[..., TensorDict]
RunOnRanks = Callable[..., list[Any]]

LENGTHS = [(3, 5), (3, 9), (6, 4), (6, 12)]
UIDS = ["a", "a", "b", "b"]
OPTIM = {"lr": 0.01, "lr_scheduler_type": "cosine", "weight_decay": 0.1, "lr_warmup_steps": 2}


Done = dict[str, Any]
"""What `work` returns: plain data, as the class would not be known on the other side."""


def _everything(learners: Learners) -> dict[str, torch.Tensor]:
    """Whole copies of weights and moments."""
    found: dict[str, torch.Tensor] = {}
    for role in ("actor", "critic"):
        if owner := getattr(learners, role):
            for name, parameter in owner.learner.parameters.items():
                moments = owner.learner.optimizer.state.get(parameter, {})
                found |= {f"{role} {kind} {name}": tensor for kind, tensor in {"weight": parameter, **moments}.items()}
    return {name: full_copy(tensor) for name, tensor in found.items()}


def _update(learners: Learners, columns: TensorDict) -> None:
    shards = (((0, 1),), ((2, 3),)) if learners.mesh.dp_size > 1 else ()
    columns["values"], columns["returns"] = columns["rollout_log_probs"] * 0.1, columns["advantages"]
    if learners.critic is not None:
        learners.critic.update(columns, UIDS, shards)
    learners.actor.update(columns, UIDS, UIDS, shards=shards)


def work(rank: Rank, todo: dict[str, Any]) -> Done:
    """One rank: read, update, write, update, publish. todo: run, and what is wanted of read (Checkpoint), batches, write (Path) and
    more (batches after the write). Whole tensors are rank 0's."""
    run: TrainRun = todo["run"]
    learners = open_learners(run, open_mesh(topology_of(run)))
    if "read" in todo:
        learners.read(todo["read"].path, todo["read"].counters)
    for batch in todo.get("batches", ()):
        _update(learners, batch)
    counters = learners.write(todo["write"], model=run.model) if "write" in todo else None
    for batch in todo.get("more", ()):
        _update(learners, batch)
    into = {name: torch.empty_like(tensor) for name, tensor in learners.snapshot(0).tensors.items()}
    snapshot = learners.snapshot(1, into).tensors
    assert all(snapshot[name] is tensor for name, tensor in into.items())
    everything = _everything(learners)
    return {"counters": counters, "snapshot": dict(snapshot), "everything": everything if rank.rank == 0 else {}}


def _assert_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() != set()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def _run(make_run: MakeRun, folder: Path, num_ranks: int, fsdp: dict[str, Any] | None = None, **model: Any) -> TrainRun:
    return make_run(
        folder,
        model=model,
        cluster={"kind": "local", "num_ranks": num_ranks} if num_ranks > 1 else {},
        algorithm={"adv_estimator": "gae"},
        actor={"optim": OPTIM, "fsdp_config": fsdp or {}},
        critic={"optim": OPTIM},
    )


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (1, {}),
    (4, {}),
    (4, {"fsdp_size": 2}),
    (4, {"tensor_model_parallel_size": 2}),
    (2, {"tensor_model_parallel_size": 2}),
]
"""The ranks of one checkpoint after the other, each written by the ranks that read the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """save(todo) -> checkpoint, written by new ranks as `work` says; what they have done is in `done`."""

    folder: Path
    run_on_ranks: RunOnRanks
    done: list[Done] = field(default_factory=list)

    def __call__(self, todo: dict[str, Any], step: int = 1) -> Checkpoint:
        def write(target: Path) -> Counters:
            self.done[:] = self.run_on_ranks(todo["run"].cluster.num_ranks, work, {**todo, "write": target})
            counters: Counters = self.done[0]["counters"]
            return counters

        return open_checkpoint(save_checkpoint(self.folder, write, step=step, version=step, keep=2))


@pytest.fixture
def save(tmp_path: Path, run_on_ranks: RunOnRanks) -> Save:
    return Save(folder=tmp_path / "c", run_on_ranks=run_on_ranks)


def test_every_layout_reads_what_the_one_before_wrote(
    make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns, save: Save
) -> None:
    folder = make_model(num_key_value_heads=2)
    todo: dict[str, Any] = {"batches": [make_columns(LENGTHS)]}
    first: Done = {}
    for step, (num_ranks, fsdp) in enumerate(LAYOUTS, 1):
        found = save({**todo, "run": _run(make_run, folder, num_ranks, fsdp)}, step)
        first = first or save.done[0]
        for kind in ("everything", "snapshot"):
            _assert_same(first[kind], save.done[0][kind])
        assert [other["snapshot"] for other in save.done[1:]] == [{}] * (num_ranks - 1)
        assert len(list((found.path / "actor").iterdir())) == num_ranks
        todo = {"read": found}
    learners = open_learners(_run(make_run, folder, 1))
    learners.read(found.path, found.counters)
    _assert_same(first["everything"], _everything(learners))
    _assert_same(first["snapshot"], learners.snapshot(1).tensors)
    last = found.path / "actor/shard-00002-model-00001-of-00001.safetensors"
    last.unlink()  # without it the tensors only look smaller
    assert find_checkpoints(save.folder).damaged == {found.path: f"{found.path}: actor/{last.name} is missing"}


@pytest.mark.parametrize("publish", ["merged", "adapter"])
def test_adapters_of_two_ranks_are_read_by_one(
    make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns, save: Save, publish: str
) -> None:
    folder, lora = make_model(), dict[str, Any](lora_rank=2, lora_publish=publish)
    found = save({"run": _run(make_run, folder, 2, **lora), "batches": [make_columns(LENGTHS)]})
    learners = open_learners(_run(make_run, folder, 1, **lora))
    learners.read(found.path, found.counters)
    _assert_same(save.done[0]["everything"], _everything(learners))
    _assert_same(save.done[0]["snapshot"], learners.snapshot(1).tensors)


def test_training_goes_on_as_without_the_break(
    make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns, save: Save, run_on_ranks: RunOnRanks
) -> None:
    run = _run(make_run, make_model(), 2)
    batches = [make_columns(LENGTHS, seed=seed) for seed in range(4)]
    found = save({"run": run, "batches": batches[:2], "more": batches[2:]})
    resumed = run_on_ranks(2, work, {"run": run, "read": found, "batches": batches[2:]})
    _assert_same(save.done[0]["everything"], resumed[0]["everything"])


class BrokenDisk(Disk):
    """Of one rank: its shards are where it dies, or is refused."""

    def __init__(self, way: str) -> None:
        self._way = way

    def write_shards(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._way == "dies":
            (folder / "shard-00002-model-00001-of-00001.safetensors").write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / "shard-00002-model-00001-of-00001.safetensors").mkdir()
        super().write_shards(folder, tensors)

    def write_tensors(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        raise OSError(f"no space left for {path.name}")


def write_badly(rank: Rank, todo: dict[str, Any]) -> list[str]:
    """What each write of a rank raises, whose disk is broken on one rank."""
    learners = open_learners(todo["run"], open_mesh(topology_of(todo["run"])))
    _update(learners, todo["batch"])
    told = []
    for number, (bad, way) in enumerate(todo["ways"]):
        try:
            disk = BrokenDisk(way) if rank.rank == bad else Disk()
            learners.write(todo["write"] / str(number), model=todo["run"].model, disk=disk)
        except OSError as error:
            told.append(str(error))
    return told


def test_a_rank_that_dies_while_it_writes_leaves_the_older_checkpoint_whole(
    tmp_path: Path, make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns, run_on_ranks: RunOnRanks
) -> None:
    run, folder = _run(make_run, make_model(), 2), tmp_path / "c"
    alone = open_learners(_run(make_run, Path(run.model.path), 1))

    def whole(target: Path) -> Counters:
        return alone.write(target, model=run.model)

    def killed(target: Path) -> Counters:
        run_on_ranks(2, write_badly, {"run": run, "write": target, "ways": [(1, "dies")], "batch": make_columns(LENGTHS)})
        raise AssertionError("a rank died, and nobody said so")

    save_checkpoint(folder, whole, step=1, version=1, keep=2)
    with pytest.raises(RankDiedError, match="rank 1"):
        save_checkpoint(folder, killed, step=2, version=2, keep=2)
    found = find_checkpoints(folder)
    assert ([one.step for one in found.whole], dict(found.damaged)) == ([1], {})
    save_checkpoint(folder, whole, step=3, version=3, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["global_step_1", "global_step_3"], "what it left is cleaned up"


def test_a_full_disk_of_one_rank_is_told_alike_by_all(
    tmp_path: Path, make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns, run_on_ranks: RunOnRanks
) -> None:
    """So that none of them waits for another."""
    run = _run(make_run, make_model(), 2)
    one, other = run_on_ranks(
        2, write_badly, {"run": run, "write": tmp_path, "ways": [(0, "refuses"), (1, "refuses")], "batch": make_columns(LENGTHS)}
    )
    assert one == other
    assert one[0] == "no space left for model.safetensors"
    assert re.fullmatch(r"\S+/1/actor cannot be written: rank 1: IsADirectoryError: .*", one[1])
