"""Ranks that die or hang, at whatever they are: the error names them, and nothing is left of the group."""

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from asyncrl.cluster import ForkServer, RankGroup
from asyncrl.errors import DeadlineError, RankDiedError, RankHungError

pytestmark = pytest.mark.ranks
Make = Callable[..., RankGroup]


def _is_dead(group: RankGroup, pids: tuple[int, ...]) -> bool:
    with pytest.raises(RankDiedError, match="cannot do total"):
        group.call("total")
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("moment", ["idle", "compute", "collective"])
def test_a_rank_that_is_killed_ends_the_call(make_group: Make, moment: str, which: int) -> None:
    group = make_group(2)
    pids = group.pids
    if moment == "idle":
        os.kill(pids[which], signal.SIGKILL)
    method = "total" if moment == "idle" else f"signal_in_{moment}"
    arguments = () if moment == "idle" else (which, signal.SIGKILL)
    with pytest.raises(
        RankDiedError, match=rf"rank {which} of 2 \(pid {pids[which]}\) was killed by SIGKILL.* during {method}"
    ) as caught:
        group.call(method, *arguments)
    assert caught.value.exit_code == 3
    assert "--resume" in str(caught.value)
    assert _is_dead(group, pids)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("moment", ["idle", "compute", "collective"])
def test_a_rank_that_is_stopped_ends_the_call_at_the_deadline(make_group: Make, moment: str, which: int) -> None:
    group = make_group(2, timeout_s=1.5)
    pids = group.pids
    if moment == "idle":
        os.kill(pids[which], signal.SIGSTOP)
    method = "total" if moment == "idle" else f"signal_in_{moment}"
    arguments = () if moment == "idle" else (which, signal.SIGSTOP)
    with pytest.raises(RankHungError, match=rf"during {method}; rank {which} is stopped") as caught:
        group.call(method, *arguments)
    assert isinstance(caught.value, DeadlineError)
    assert caught.value.exit_code == 3
    assert all(words in str(caught.value) for words in ("cluster.rank_timeout_s = 1.5 s", "--resume", f"pid {pids[0]}"))
    assert _is_dead(group, pids)


def test_large_arguments_to_a_stopped_rank_end_at_the_deadline(make_group: Make) -> None:
    """More than a socket holds: who would write until it is read hangs with the rank."""
    group = make_group(2, timeout_s=1.0)
    os.kill(group.pids[1], signal.SIGSTOP)
    with pytest.raises(RankHungError, match="rank 1 is stopped"):
        group.call("echo", b"x" * 10**7)


def test_large_arguments_and_replies_travel(make_group: Make) -> None:
    data = os.urandom(3 * 10**6)
    assert [reply[3] for reply in make_group(2).call("echo", data)] == [(data,)] * 2  # type: ignore[index]


def test_a_call_may_take_longer_than_the_deadline_while_a_rank_beats(make_group: Make) -> None:
    group = make_group(2, timeout_s=2.0)
    group.call("work_on", 1)
    assert group.call("total") == [3.0, 3.0]


def test_the_rank_with_fewer_beats_is_the_one_behind(make_group: Make) -> None:
    group = make_group(3, timeout_s=1.0)
    with pytest.raises(RankHungError, match=r"rank 1 is behind: rank 1 .*; rank . .*'fall_behind: a piece of work'"):
        group.call("fall_behind", 1)


def test_output_of_ranks_is_not_lost_nor_is_where_they_hung(make_group: Make, capfd: pytest.CaptureFixture[str]) -> None:
    server = ForkServer(["json"])  # it has this test's stdout and stderr
    group = make_group(1, timeout_s=0.5, server=server)
    group.call("say", "<words>")
    with pytest.raises(RankHungError, match="stacks are on stderr"):
        group.call("wait")
    server.close()
    told = capfd.readouterr()
    assert told.out == "<words>"
    assert 'rank_targets.py", line' in told.err


@pytest.mark.parametrize("code", [0, 7])
def test_a_rank_that_exits_is_told_with_its_code(make_group: Make, code: int) -> None:
    with pytest.raises(
        RankDiedError, match=f"rank 1 of 2 .* ended with exit code {code} during exit; its last beat was 'exit: begun'"
    ):
        make_group(2).call("exit", 1, code)


def test_a_rank_that_dies_while_it_starts(make_group: Make) -> None:
    with pytest.raises(RankDiedError, match=r"rank 1 of 2 .* was killed by SIGSEGV during start; .*'start: making what is served'"):
        make_group(2, "die")


def test_a_rank_that_hangs_while_it_starts(make_group: Make) -> None:
    with pytest.raises(RankHungError, match="during start; rank 1 is stopped"):
        make_group(2, "stop", timeout_s=1.0, start_timeout_s=1.5)


def test_a_death_goes_before_what_its_peers_raise(make_group: Make) -> None:
    """A peer's collective fails as well, and may be told first."""
    group = make_group(4)
    with pytest.raises(RankDiedError, match=r"rank 2 of 4 .* SIGKILL"):
        group.call("signal_in_compute", 2, signal.SIGKILL)


def test_ranks_ignore_what_is_meant_for_the_controller(make_group: Make) -> None:
    group = make_group(2)
    for pid in group.pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert group.call("total") == [3.0, 3.0]


def test_ctrl_c_while_the_fork_server_imports_does_not_end_it(make_group: Make, capfd: pytest.CaptureFixture[str]) -> None:
    server = ForkServer([])
    os.kill(server.pid, signal.SIGINT)
    os.kill(server.pid, signal.SIGTERM)
    try:
        assert make_group(1, server=server).call("total") == [1.0]
    finally:
        server.close()
    assert capfd.readouterr().err == ""


def test_the_end_of_the_fork_server_ends_the_group(make_group: Make, wait_until_gone: Callable[[Iterable[int]], None]) -> None:
    server = ForkServer(["json"])
    group = make_group(2, server=server)
    pids = group.pids
    parent = int(Path(f"/proc/{pids[0]}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    wait_until_gone(pids)
    with pytest.raises(RankDiedError, match="the fork server is gone too"):
        group.call("total")
    with pytest.raises(RankDiedError, match="cannot be started, as the fork server is gone"):
        make_group(2, server=server)
    server.close()
    server.close()
