"""Checkpoints: a crash at any file operation, damage of any file, and which ones are kept."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from asyncrl.config import ModelConfig, TrainRun
from asyncrl.errors import CheckpointError
from asyncrl.training import checkpoint
from asyncrl.training.checkpoint import (
    Checkpoint,
    Counters,
    delete_damaged,
    find_checkpoints,
    kept_steps,
    open_checkpoint,
    save_checkpoint,
)
from asyncrl.training.disk import Disk
from asyncrl.training.learners import Learners, open_learners

MakeModel = Callable[..., Path]
MakeRun = Callable[..., TrainRun]
MakeColumns = Callable[..., TensorDict]


class Crash(OSError):
    """The process dies here."""


class CrashingDisk(Disk):
    """Dies in the middle of operation `at`: a write leaves half of its bytes, a removal half of its files."""

    def __init__(self, at: int) -> None:
        self.operations = 0
        self._at = at

    def _dies(self) -> bool:
        self.operations += 1
        return self.operations - 1 == self._at

    def make_folder(self, path: Path) -> None:
        if self._dies():
            raise Crash
        super().make_folder(path)

    def write(self, path: Path, content: bytes) -> None:
        if self._dies():
            path.write_bytes(content[: len(content) // 2])
            raise Crash
        super().write(path, content)

    def copy(self, source: Path, target: Path) -> None:
        if self._dies():
            target.touch()
            raise Crash
        super().copy(source, target)

    def write_tensors(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        dies = self._dies()
        super().write_tensors(path, tensors)
        if dies:
            path.write_bytes(path.read_bytes()[:-7])
            raise Crash

    def rename(self, source: Path, target: Path) -> None:
        if self._dies():
            raise Crash
        super().rename(source, target)

    def sync_folder(self, path: Path) -> None:
        if self._dies():
            raise Crash
        super().sync_folder(path)

    def remove(self, path: Path) -> None:
        if self._dies():
            for file in sorted(path.rglob("*"))[::2] if path.is_dir() else []:
                if file.is_file():
                    file.unlink()
            raise Crash
        super().remove(path)


@pytest.fixture
def learners(make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns) -> Learners:
    """An actor with moments, and a critic."""
    opened = open_learners(make_run(make_model(), algorithm={"adv_estimator": "gae"}))
    opened.actor.update(make_columns([(3, 5), (6, 12)]), ["a", "b"])
    return opened


def _write_little(folder: Path, disk: Disk) -> Counters:
    disk.make_folder(folder / "model")
    for name in ("model/config.json", "rng.safetensors"):
        disk.write(folder / name, b"some bytes")
    disk.sync_folder(folder / "model")
    return {"actor": {"updates": 1}}


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """save(step, keep=2, disk=None, name="checkpoints", learners=None, **controllers) -> path, in tmp_path / name.

    learners: None writes two small files in their place."""

    def run(
        step: int,
        *,
        keep: int = 2,
        disk: Disk | None = None,
        name: str = "checkpoints",
        learners: Learners | None = None,
        **controllers: float,
    ) -> Path:
        disk = disk or Disk()
        little = partial(_write_little, disk=disk)
        source = ModelConfig(path=str(next(tmp_path.glob("*tied-0"), "")))
        write = little if learners is None else partial(learners.write, model=source, disk=disk)
        return save_checkpoint(tmp_path / name, write, step=step, version=step, keep=keep, controllers=controllers, disk=disk)

    return run


def _newest(folder: Path, said: list[str] | None = None, disk: Disk | None = None) -> Checkpoint | None:
    """The newest whole one; damaged ones are deleted."""
    found = find_checkpoints(folder)
    delete_damaged(found, ([] if said is None else said).append, disk)
    return next(iter(found.whole), None)


def _step(tmp_path: Path, name: str = "checkpoints") -> tuple[int | None, list[str]]:
    """Of the newest whole one, and what was said; damaged ones are gone."""
    said: list[str] = []
    found = _newest(tmp_path / name, said)
    return (None if found is None else found.step), said


def test_what_is_saved_comes_back(tmp_path: Path, save: Callable[..., Path]) -> None:
    save(3, kl_coef=0.25)
    found = _newest(tmp_path / "checkpoints")
    assert found is not None
    assert (found.step, found.version, found.controllers) == (3, 3, {"kl_coef": 0.25})
    assert found.counters == {"actor": {"updates": 1}}
    assert found.model_path == tmp_path / "checkpoints/global_step_3/model"


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert _step(tmp_path) == (None, [])


def test_a_crash_at_any_file_operation_leaves_a_whole_checkpoint(
    tmp_path: Path, learners: Learners, save: Callable[..., Path]
) -> None:
    """keep = 1, so the removal of the older one is among the operations. A save afterwards cleans up."""
    counting = CrashingDisk(-1)
    save(1, name="count")
    save(2, name="count", keep=1, disk=counting, learners=learners)
    assert counting.operations > 25
    for at in range(counting.operations):
        name = f"crash-{at}"
        save(1, name=name)
        with pytest.raises(Crash):
            save(2, name=name, keep=1, disk=CrashingDisk(at), learners=learners)
        assert _step(tmp_path, name)[0] in (1, 2), f"nothing whole after a crash in operation {at}"
        save(3, name=name, keep=1)
        assert [path.name for path in (tmp_path / name).iterdir()] == ["global_step_3"]


def test_a_crash_while_a_step_is_saved_again_keeps_the_first(tmp_path: Path, save: Callable[..., Path]) -> None:
    save(1, keep=1)
    at = 0
    while True:
        try:
            save(1, keep=1, disk=CrashingDisk(at))
        except Crash:
            assert _step(tmp_path)[0] == 1, f"nothing whole after a crash in operation {at}"
            at += 1
        else:
            break
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["global_step_1"]


def test_every_file_matters_and_what_is_damaged_is_deleted(tmp_path: Path, learners: Learners, save: Callable[..., Path]) -> None:
    save(1)
    newest, copy = save(2, learners=learners), tmp_path / "copy"
    shutil.copytree(newest, copy)
    for name in [path.relative_to(copy) for path in copy.rglob("*") if path.is_file()]:
        content = (copy / name).read_bytes()
        for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1]), content + b"x", None):
            shutil.copytree(copy, newest, dirs_exist_ok=True)
            (newest / name).unlink() if damaged is None else (newest / name).write_bytes(damaged)
            step, said = _step(tmp_path)
            assert step == 1
            assert len(said) == 1
            assert "global_step_2: " in said[0]
            assert said[0].endswith("; it is deleted")
            assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["global_step_1"]


def test_a_crash_while_a_damaged_one_is_deleted_leaves_it_damaged(tmp_path: Path, save: Callable[..., Path]) -> None:
    """Half a removal is no checkpoint, and is finished the next time."""
    for at in range(2):
        save(1)
        (save(2) / "rng.safetensors").write_bytes(b"x")
        with pytest.raises(Crash):
            _newest(tmp_path / "checkpoints", disk=CrashingDisk(at))
        assert _step(tmp_path)[0] == 1
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["global_step_1"]


def test_the_older_one_is_checked_as_well(tmp_path: Path, save: Callable[..., Path]) -> None:
    """Else it would count as kept, and the steps after it be purged."""
    (save(1) / "rng.safetensors").write_bytes(b"x")
    save(2)
    assert _step(tmp_path) == (2, [f"checkpoint {tmp_path}/checkpoints/global_step_1: rng.safetensors has 1 bytes instead of "
        f"{(tmp_path / 'checkpoints/global_step_2/rng.safetensors').stat().st_size}; it is deleted"])  # fmt: skip
    assert kept_steps(tmp_path / "checkpoints", 2) == [0, 2]


def test_step_0_counts_as_the_oldest_while_there_are_fewer(tmp_path: Path, save: Callable[..., Path]) -> None:
    folder = tmp_path / "checkpoints"
    assert kept_steps(folder, 2) == [0]
    for step, kept in ((2, [0, 2]), (4, [2, 4]), (6, [4, 6])):
        save(step)
        assert kept_steps(folder, 2) == kept
    save(8, keep=3)
    assert kept_steps(folder, 3) == [4, 6, 8]


def test_only_the_newest_are_kept_and_leftovers_go(tmp_path: Path, save: Callable[..., Path]) -> None:
    folder = tmp_path / "checkpoints"
    for step in (2, 9, 10):
        with pytest.raises(Crash):
            save(step + 100, disk=CrashingDisk(6))
        save(step)
    assert sorted(path.name for path in folder.iterdir()) == ["global_step_10", "global_step_9"]
    assert _step(tmp_path) == (10, [])


def test_a_checkpoint_of_a_later_format_is_refused(save: Callable[..., Path]) -> None:
    path = save(1)
    manifest = json.loads((path / "manifest.json").read_text())
    text = json.dumps({**manifest, "format": 99})
    (path / "manifest.json").write_text(text)
    (path / "DONE").write_text(checkpoint._checksum(text.encode()))
    with pytest.raises(CheckpointError, match="has format 99"):
        open_checkpoint(path)
    save(0)
    with pytest.raises(CheckpointError, match="has format 99"):  # going on from step 0 is not what its owner means
        find_checkpoints(path.parent)
    assert (path / "DONE").is_file()


def test_tensors_that_a_full_disk_refuses_are_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"weights\.safetensors cannot be written: "):
        Disk().write_tensors(tmp_path / "no folder" / "weights.safetensors", {"a": torch.zeros(2)})


def test_a_damaged_checkpoint_is_not_kept_in_place_of_a_whole_one(tmp_path: Path, save: Callable[..., Path]) -> None:
    save(1)
    weights = save(2) / "model" / "config.json"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert _step(tmp_path)[0] == 1
    save(3)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["global_step_1", "global_step_3"]
    (tmp_path / "checkpoints/global_step_3/DONE").unlink()
    assert _step(tmp_path)[0] == 1
