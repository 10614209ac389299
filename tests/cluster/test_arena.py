"""The arena without processes: what one side writes the other sees, dtypes, reuse, lifetimes, a full memory."""

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch

from asyncrl import shared_memory
from asyncrl.cluster import Arena, Placed, RankArena, wire
from asyncrl.errors import RankError


def _deliver(arena: Arena, rank: RankArena) -> None:
    """What a call tells the ranks first."""
    news = arena.news()
    rank.drop(news.dropped)
    for number, size, fd in news.blocks:
        rank.add(number, size, fd)


def _blocks(placed: Placed) -> set[int]:
    return {entry.block for entry in placed.entries.values()}


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def test_every_dtype_and_shape_travels() -> None:
    tensors = {f"{dtype}": (torch.rand(3, 5) * 4).to(dtype) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 7, dtype=torch.int64),
        "turned": torch.arange(6).view(2, 3).T,
        "strided": torch.arange(20.0)[::3],
        "with gradient": torch.ones(2, requires_grad=True),
        "one": torch.tensor([True]),
    }
    arena, rank = Arena(), RankArena()
    placed, _ = arena.place(tensors)
    _deliver(arena, rank)
    opened = rank.open(placed)
    assert opened.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (opened[name].dtype, opened[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(opened[name], tensor), name
        assert opened[name].is_contiguous()


def test_what_a_rank_writes_into_outputs_is_there_and_they_begin_as_zeros() -> None:
    arena, rank = Arena(), RankArena()
    for _ in range(2):  # the second time in used memory
        placed, outputs = arena.place({"a": torch.ones(4)}, {"b": ((4,), torch.bfloat16), "none": ((0,), torch.int64)})
        assert outputs["b"].tolist() == [0.0] * 4
        _deliver(arena, rank)
        rank.open(placed)["b"][1:3] = 2.0
        assert outputs["b"].tolist() == [0.0, 2.0, 2.0, 0.0]
        assert outputs["none"].shape == (0,)
        del placed, outputs


def test_an_output_with_the_name_of_a_column_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="name of a column"):
        Arena().place({"a": torch.ones(1)}, {"a": ((1,), torch.float32)})


def test_a_block_is_used_again_when_its_last_tensor_is_gone_and_not_before() -> None:
    arena = Arena()
    placed, _ = arena.place({"a": torch.zeros(1000)})
    second, _ = arena.place({"a": torch.ones(1000)})
    assert _blocks(placed).isdisjoint(_blocks(second)), "`placed` may still be on its way to the ranks"
    first = _blocks(placed)
    del placed
    third, outputs = arena.place({"a": torch.ones(900)})
    assert _blocks(third) == first
    view = arena.new_block({"b": ((1000,), torch.float32)})[1]["b"][10:20]
    del outputs, third
    gc.collect()
    fourth, tensors = arena.new_block({"b": ((1000,), torch.float32)})
    tensors["b"].fill_(7.0)
    assert _blocks(fourth) == first
    assert view.tolist() == [0.0] * 10


def test_a_result_that_is_kept_does_not_keep_the_columns() -> None:
    arena = Arena()
    placed, outputs = arena.place({"a": torch.zeros(1000)}, {"b": ((10,), torch.float32)})
    inputs = placed.entries["a"].block
    del placed
    again, _ = arena.place({"a": torch.zeros(1000)})
    assert again.entries["a"].block == inputs
    assert outputs["b"].tolist() == [0.0] * 10


def test_a_larger_block_takes_the_place_of_smaller_ones() -> None:
    arena, rank = Arena(), RankArena()
    sizes = [10, 1000, 100_000, 100, 100_000]
    numbers = []
    for size in sizes:
        placed, _ = arena.place({"a": torch.full((size,), float(size))})
        _deliver(arena, rank)
        assert rank.open(placed)["a"].sum() == size * size
        numbers.append(placed.entries["a"].block)
        del placed
    assert numbers == [1, 2, 3, 3, 3]
    assert len(rank._blocks) == 1


def test_a_block_that_no_rank_was_told_of_is_dropped_in_silence() -> None:
    arena, rank = Arena(), RankArena()
    arena.place({"a": torch.zeros(10)})
    placed, _ = arena.place({"a": torch.zeros(10_000)})
    news = arena.news()
    assert [number for number, _, _ in news.blocks] == [2]
    assert news.dropped == ()
    for number, size, fd in news.blocks:
        rank.add(number, size, fd)
    assert rank.open(placed)["a"].shape == (10_000,)


def test_tensors_outlive_the_arena_and_then_their_memory_goes() -> None:
    arena, rank = Arena(), RankArena()
    placed, outputs = arena.place({"a": torch.arange(10.0)}, {"b": ((4,), torch.float32)})
    _deliver(arena, rank)
    seen = rank.open(placed)["a"]
    rank.open(placed)["b"].fill_(3.0)
    arena.close()
    arena.close()
    memory = weakref.ref(placed._leases[1].obj)
    del arena, placed
    gc.collect()
    assert outputs["b"].tolist() == [3.0] * 4
    rank.drop([1, 2])
    assert seen.tolist() == list(range(10))
    del outputs
    gc.collect()
    assert memory() is None


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_no_descriptor_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena, rank = Arena(), RankArena()
    for size in (10, 1000, 10**5):
        placed, _ = arena.place({"a": torch.zeros(size)}, {"b": ((size,), torch.float32)})
        _deliver(arena, rank)
        rank.open(placed)
    arena.place({"never told": torch.zeros(10**6)})
    arena.close()
    del arena, rank, placed, _
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_placed_is_small_on_its_way() -> None:
    placed, _ = Arena().place({"a": torch.zeros(10**6)}, {"b": ((10**6,), torch.float32)})
    data = wire.encode(placed)
    assert len(data) < 1000
    copy = wire.decode(data)
    assert isinstance(copy, Placed)
    assert copy == placed


def test_memory_that_is_not_there_is_an_error_with_words() -> None:
    arena = Arena()
    with pytest.raises(RankError, match=r"no room for \d+\.\d MiB of shared memory in .*: \d+\.\d MiB are free; .*--resume"):
        arena.new_block({"a": ((2**50,), torch.uint8)})
    placed, _ = arena.place({"a": torch.ones(3)})  # and the arena goes on
    assert len(placed.entries) == 1


def test_without_a_memory_folder_the_temporary_one_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path / "none")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    arena, rank = Arena(), RankArena()
    placed, _ = arena.place({"a": torch.ones(3)})
    _deliver(arena, rank)
    assert rank.open(placed)["a"].tolist() == [1.0] * 3
    assert list(tmp_path.iterdir()) == []
