"""RankGroup: calls and their replies, what ranks raise, starting, closing."""

import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from asyncrl.cluster import RankGroup
from asyncrl.errors import AlgorithmError, ConfigError, ModelError, RankDiedError, RankError

pytestmark = pytest.mark.ranks
Make = Callable[..., RankGroup]


def test_replies_come_in_rank_order_with_payload_and_arguments(make_group: Make) -> None:
    group = make_group(3, payload={"a": 1})
    assert group.call("echo", 1, b=2) == [(rank, 3, {"a": 1}, (1,), {"b": 2}) for rank in range(3)]
    assert len(set(group.pids)) == 3
    assert group.call("total") == [6.0] * 3


def test_threads_and_network_are_those_asked_for(make_group: Make) -> None:
    assert make_group(2, num_threads=2).call("threads") == [2, 2]
    assert make_group(1).call("threads") == [1]
    assert make_group(1).call("address") in (["lo"], ["lo0"])


def test_two_groups_live_side_by_side(make_group: Make) -> None:
    first, second = make_group(2, payload=1), make_group(1, payload=2)
    assert second.call("total") == [1.0]
    second.close()
    assert first.call("total") == [3.0, 3.0]


def test_columns_travel_in_shared_memory_and_back(make_group: Make) -> None:
    group = make_group(2)
    for size in (10, 5, 4000, 10):  # a block is used again, and a larger one takes its place
        column = torch.arange(size, dtype=torch.float32)
        placed, outputs = group.arena.place({"column": column}, {"doubled": ((size,), torch.float32)})
        assert group.call("double", placed) == [None, None]
        assert torch.equal(outputs["doubled"], column * 2)


def test_results_that_are_kept_are_never_written_over_and_outlive_the_ranks(make_group: Make) -> None:
    group, kept = make_group(2), []
    for step in range(4):
        placed, outputs = group.arena.place({"column": torch.full((100,), float(step))}, {"doubled": ((100,), torch.float32)})
        group.call("double", placed)
        kept.append(outputs["doubled"])
    group.close()
    assert [sorted(set(column.tolist())) for column in kept] == [[0.0], [2.0], [4.0], [6.0]]


def test_ranks_let_blocks_go_that_the_controller_has_dropped(make_group: Make) -> None:
    group = make_group(1)
    for size in (1000, 10**6, 2 * 10**6):
        placed, outputs = group.arena.place({"column": torch.zeros(size)}, {"doubled": ((size,), torch.float32)})
        group.call("double", placed)
        del placed, outputs
    # the last inputs and outputs, and the beats
    assert len(group.call("mapped")[0]) == 3  # type: ignore[arg-type]


def test_all_of_shared_memory_is_without_a_name(make_group: Make) -> None:
    group = make_group(2)
    placed, _ = group.arena.place({"column": torch.zeros(10)}, {"doubled": ((10,), torch.float32)})
    group.call("double", placed)
    lines = [line for lines in group.call("mapped") for line in lines]  # type: ignore[attr-defined]
    assert len(lines) == 6
    assert all(line.strip().endswith("(deleted)") for line in lines), lines


def test_what_all_ranks_raise_alike_is_raised_as_itself_and_they_go_on(make_group: Make) -> None:
    group = make_group(2)
    with pytest.raises(AlgorithmError, match="the loss raised") as caught:
        group.call("raise_all", "algorithm")
    assert caught.value.has_learned
    assert caught.value.__notes__ == ["a note"]
    assert "rank_targets.py" in str(caught.value.__cause__)
    assert group.call("total") == [3.0, 3.0]


@pytest.mark.parametrize(
    ("kind", "raised", "match"),
    [
        ("two", RankError, "rank . raised TwoArguments: left 3"),
        ("odd", ConfigError, r"^key a\.b is wrong$"),
        ("unpicklable", RankError, "rank . raised Unpicklable: holds a lock"),
        ("exit", RankError, "SystemExit: 3"),
        ("interrupt", RankError, "KeyboardInterrupt"),
        ("memory", MemoryError, "no memory"),
        ("here", RankError, "of the rank alone"),
        ("group", RankError, "ExceptionGroup: two"),
    ],
)
def test_an_exception_that_cannot_travel_keeps_its_words(make_group: Make, kind: str, raised: type[Exception], match: str) -> None:
    group = make_group(2)
    with pytest.raises(raised, match=match) as caught:
        group.call("raise_all", kind)
    assert "rank_targets.py" in str(caught.value.__cause__)
    assert group.call("total") == [3.0, 3.0]


def test_an_exception_whose_words_raise_harms_nobody(make_group: Make) -> None:
    group = make_group(2)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # its message cannot be had
        group.call("raise_all", "words")
    assert type(caught.value).__name__ == "BadWords"
    assert group.call("total") == [3.0, 3.0]


@pytest.mark.parametrize("collective", [False, True])
def test_one_that_raises_ends_the_group_with_its_exception(make_group: Make, collective: bool) -> None:
    """The others are done, or sit in a collective for good."""
    group = make_group(3, grace_s=0.2)
    with pytest.raises(AlgorithmError, match="the loss raised"):
        group.call("raise_one", 1, collective=collective)
    with pytest.raises(RankDiedError, match=r"cannot do total.*raise_one failed: the loss raised"):
        group.call("total")
    assert group.pids == ()


def test_ranks_that_raise_apart_are_out_of_step(make_group: Make) -> None:
    group = make_group(2)
    with pytest.raises(ValueError, match="is unhappy"):
        group.call("raise_apart")
    with pytest.raises(RankDiedError):
        group.call("total")


def test_what_does_not_travel_is_the_calls_error_alone(make_group: Make) -> None:
    group = make_group(2)
    with pytest.raises(TypeError, match="cannot pickle"):
        group.call("echo", threading.Lock())
    with pytest.raises(TypeError, match="cannot pickle"):
        group.call("lock")
    with pytest.raises(RankError, match="serves no method 'nothing'"):
        group.call("nothing")
    assert group.call("total") == [3.0, 3.0]


@pytest.fixture
def only_here(monkeypatch: pytest.MonkeyPatch) -> object:
    """Of a class that ranks cannot import, as one of the user's script is."""
    module = ModuleType("only_here")
    kind = type("OnlyHere", (), {"__module__": "only_here"})
    monkeypatch.setattr(module, "OnlyHere", kind, raising=False)
    monkeypatch.setitem(sys.modules, "only_here", module)
    return kind()


def test_an_argument_that_ranks_cannot_read_is_an_error_and_no_hang(make_group: Make, only_here: object) -> None:
    group = make_group(2)
    with pytest.raises(ImportError, match="only_here"):
        group.call("echo", only_here)
    assert group.call("total") == [3.0, 3.0]


def test_what_the_target_refuses_comes_out_as_itself(make_group: Make) -> None:
    with pytest.raises(ConfigError, match=r"^key a\.b is wrong$") as caught:
        make_group(2, "refuse_config", "a.b")
    assert caught.value.exit_code == 2
    with pytest.raises(ModelError, match="rank 1 is empty"):
        make_group(2, "refuse_on_one", grace_s=0.2)


@pytest.mark.parametrize(
    ("target", "raised"),
    [("no_such_module:serve", ModuleNotFoundError), ("rank_targets:no_such_function", AttributeError)],
)
def test_a_target_that_is_not_there_is_said(make_group: Make, target: str, raised: type[Exception]) -> None:
    with pytest.raises(raised, match="no_such"):
        make_group(2, target)


def test_a_payload_that_does_not_travel_leaves_nothing_behind(make_group: Make, only_here: object) -> None:
    group = make_group(2, is_started=False)
    with pytest.raises(TypeError, match="cannot pickle"):
        group.start(threading.Lock())
    with pytest.raises(ImportError, match="only_here"):
        make_group(2, payload=only_here)


def test_close_from_another_thread_ends_a_call(make_group: Make) -> None:
    group = make_group(2)
    pids = group.pids
    closer = threading.Timer(0.2, group.close)
    closer.start()
    with pytest.raises(RankDiedError, match="closed during wait"):
        group.call("wait")
    closer.join()
    group.close()
    with pytest.raises(RankDiedError, match=r"they were closed|closed during wait"):
        group.call("total")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_close_from_another_thread_ends_a_start(make_group: Make) -> None:
    group = make_group(2, "stop", is_started=False)
    closer = threading.Timer(0.5, group.close)
    closer.start()
    with pytest.raises(RankDiedError, match="closed"):
        group.start(None)
    closer.join()


def test_a_closed_group_is_not_started_and_does_nothing(make_group: Make) -> None:
    group = make_group(2, is_started=False)
    with pytest.raises(RankDiedError, match="not started"):
        group.call("total")
    group.close()
    group.close()
    with pytest.raises(RankDiedError, match="were closed"):
        group.start(None)
