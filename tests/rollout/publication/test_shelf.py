"""One copy of a snapshot, for as long as it is used, and nothing left of it afterwards."""

import asyncio
import dataclasses
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.errors import EngineError
from asyncrl.rollout.publication import Shelf
from asyncrl.rollout.publication.placed import Placed, Where, opened, place
from asyncrl.world import RealWorld


@pytest.fixture
async def world() -> AsyncIterator[RealWorld]:
    async with RealWorld() as world:
        yield world


def _snapshot(fill: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "a": torch.full((3, 5), fill),
        "half": torch.full((7,), fill, dtype=torch.bfloat16),
        "scalar": torch.tensor(fill),
        "none": torch.empty(0, 4),
        "across": torch.arange(6.0).view(2, 3).T,
    }


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _is_open(placed: Placed) -> bool:
    return Path(f"/proc/self/fd/{placed.where.fd}").exists()


def test_what_is_opened_is_what_was_placed() -> None:
    snapshot = _snapshot(3.0)
    placed = place(snapshot)
    found = opened(placed.where)
    assert list(found) == list(snapshot)
    for name, tensor in snapshot.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    found["a"].zero_()  # the reader's own matter
    assert opened(placed.where)["a"].tolist() == snapshot["a"].tolist()


def test_opened_tensors_outlive_the_copy() -> None:
    placed = place(_snapshot(2.0))
    where, found = placed.where, opened(placed.where)
    del placed
    assert found["a"].sum() == 30
    with pytest.raises(EngineError, match=r"cannot be opened \(another machine, container or user\?\)"):
        opened(where)


def test_memory_that_is_somebody_elses_is_refused(tmp_path: Path) -> None:
    placed, other = place(_snapshot()), place(_snapshot())
    with pytest.raises(EngineError, match="is not the memory that was spoken of"):
        opened(dataclasses.replace(placed.where, fd=other.where.fd))
    with (tmp_path / "short").open("wb") as short, pytest.raises(EngineError, match="is not the memory"):
        opened(dataclasses.replace(placed.where, fd=short.fileno()))


def test_no_room_names_the_other_way() -> None:
    huge = torch.empty(1).expand(2**48)
    with pytest.raises(EngineError, match=r'no room for .* MiB are free; .*rollout\.weight_transfer = "directory"'):
        place({"huge": huge})


def test_the_memory_has_no_name_that_a_killed_process_would_leave() -> None:
    placed = place(_snapshot())
    assert os.readlink(f"/proc/self/fd/{placed.where.fd}").endswith("(deleted)")


def test_memory_goes_with_a_process_that_is_killed() -> None:
    code = (
        "import json, time, torch; from dataclasses import asdict; from asyncrl.rollout.publication.placed import place\n"
        "placed = place({'a': torch.ones(1000)}); print(json.dumps(asdict(placed.where)), flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        where = Where(**json.loads(process.stdout.readline()))
    found = opened(where)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert found["a"].sum() == 1000  # whoever has opened it goes on
    with pytest.raises(EngineError, match="cannot be opened"):
        opened(where)


async def test_a_snapshot_is_copied_once(world: RealWorld) -> None:
    shelf, snapshot = Shelf(world=world), _snapshot()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(shelf.place(dict(snapshot))) for _ in range(5)]
    assert len({id(task.result()) for task in tasks}) == 1
    assert await shelf.place(_snapshot()) is not tasks[0].result()  # equal, but others
    await shelf.close()


async def test_tensors_that_were_written_to_are_copied_again(world: RealWorld) -> None:
    shelf, snapshot = Shelf(world=world), _snapshot(1.0)
    await shelf.place(snapshot)
    snapshot["a"].fill_(4.0)
    assert opened((await shelf.place(snapshot)).where)["a"].sum() == 60
    await shelf.close()


async def test_a_copy_goes_with_the_last_who_uses_it(world: RealWorld) -> None:
    shelf, old, new = Shelf(world=world), _snapshot(), _snapshot()
    used = await shelf.place(old)
    fd = used.where.fd
    newer = await shelf.place(new)
    assert _is_open(used)
    assert opened(used.where)["a"].sum() == 15
    del used
    gc.collect()
    assert os.fstat(newer.where.fd).st_size == newer.where.size
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    await shelf.close()
    assert _is_open(newer)
    fd = newer.where.fd
    del newer
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


async def test_a_shelf_keeps_no_snapshot_alive(world: RealWorld) -> None:
    shelf, snapshot = Shelf(world=world), _snapshot()
    await shelf.place(snapshot)
    gone = threading.Event()

    class Told:
        def __del__(self) -> None:
            gone.set()

    snapshot["a"].told = Told()  # type: ignore[attr-defined]
    del snapshot
    gc.collect()
    assert gone.is_set()
    await shelf.close()


async def test_who_waits_for_a_copy_gets_one_when_its_maker_is_cancelled(world: RealWorld) -> None:
    shelf, snapshot = Shelf(world=world), _snapshot()
    first = asyncio.create_task(shelf.place(snapshot))
    second = asyncio.create_task(shelf.place(snapshot))
    await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(30):
        assert _is_open(await second)
    await shelf.close()


async def test_directories_are_whole_and_old_ones_go(world: RealWorld, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    (folder / "asyncrl-weights-000001").mkdir(parents=True)  # of a run that was killed
    (folder / "asyncrl-weights-000002.tmp").mkdir()
    shelf = Shelf(world=world, folder=folder)
    first = await shelf.write(old := _snapshot(1.0))
    assert _names(folder) == {first.path.name}
    assert torch.equal(load_file(first.path / "model.safetensors")["across"], old["across"])
    second = await shelf.write(new := _snapshot(2.0))
    assert first.path.exists()  # somebody reads it still
    assert await shelf.write(new) is second
    del first
    third = await shelf.write(_snapshot(3.0))
    assert _names(folder) == {second.path.name, third.path.name}
    del second, third
    await shelf.close()
    assert _names(folder) == set()


async def test_a_folder_of_its_own_goes_with_the_shelf(world: RealWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shelf = Shelf(world=world)
    written = await shelf.write(_snapshot())
    assert written.path.is_relative_to(tmp_path)
    await shelf.close()
    await shelf.close()
    assert _names(tmp_path) == set()


async def test_what_else_is_in_the_folder_stays(world: RealWorld, tmp_path: Path) -> None:
    (tmp_path / "weights-final").mkdir()
    shelf = Shelf(world=world, folder=tmp_path)
    for fill in (1.0, 2.0):
        await shelf.write(_snapshot(fill))
    await shelf.close()
    assert _names(tmp_path) == {"weights-final"}


async def test_a_copy_that_found_no_room_leaves_none_of_it(world: RealWorld, tmp_path: Path) -> None:
    shelf, (soft, hard) = Shelf(world=world, folder=tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(EngineError, match="cannot be written"):
            await shelf.write({"a": torch.zeros(1 << 16)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _names(tmp_path) == set()
    await shelf.close()


async def test_a_directory_that_cannot_be_written_is_an_engines_error(world: RealWorld, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shelf = Shelf(world=world, folder=tmp_path / "file" / "below")
    with pytest.raises(EngineError, match=r"weights cannot be written for the engines: .*below"):
        await shelf.write(_snapshot())
    await shelf.close()
