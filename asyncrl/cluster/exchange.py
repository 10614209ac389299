"""One call to all ranks: what was sent, what has come back, and which of its ends it comes to.

1. All have answered: their replies. All raised alike: that exception. The ranks are in step.
2. One is dead: RankDiedError, whatever the others raised in the meantime (they lost a peer).
3. One raised, and after `grace_s` the others have not raised alike: its exception, as itself.
4. Nobody gave a sign of life for `timeout_s`: RankHungError.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, Signals

from asyncrl.cluster import wire
from asyncrl.cluster.beats import Beat
from asyncrl.cluster.rank_main import Returned
from asyncrl.cluster.remote_errors import Raised, unpack
from asyncrl.cluster.team import Member, Team
from asyncrl.errors import RankDiedError, RankHungError

CODE_TIMEOUT_S = 5.0
"""For the exit code of a rank whose socket is closed: the server reaps it within milliseconds, unless it is gone itself."""
NEXT = "go on from the last checkpoint with --resume, or start the run again if it had not begun"
SHOWN = 8
"""Ranks that a message shows, the ones that are behind first."""


class Exchange:
    """Frames are queued by the caller; `run` waits for the end. what: the method, for messages."""

    def __init__(self, team: Team, what: str, *, timeout_s: float, grace_s: float, is_closing: Callable[[], bool]) -> None:
        self._team, self._what = team, what
        self._timeout_s, self._grace_s, self._is_closing = timeout_s, grace_s, is_closing
        self._begun_at = time.monotonic()
        self._replies: dict[int, Returned | Raised] = {}
        self._first: tuple[int, Raised, float] | None = None
        self.is_in_step = False
        """Can the ranks be asked again?"""

    def run(self) -> list[object]:
        """The ranks' replies, in rank order. Raises RankDiedError, RankHungError, or what a rank raised."""
        while len(self._replies) < len(self._team.members):
            now = time.monotonic()
            self._raise_if_dead(now)
            until = self._silent_at()
            if self._first:
                until = min(until, self._first[2] + self._grace_s)
            if now >= until:
                self._give_up(now)
            for member, frame in self._team.wait(min(until, self._code_at()) - now):
                self._note(member, frame)
        return self._settle()

    def _note(self, member: Member, frame: bytes) -> None:
        reply = wire.decode(frame)
        assert isinstance(reply, (Returned, Raised))
        self._replies[member.rank] = reply
        if isinstance(reply, Raised) and self._first is None:
            self._first = member.rank, reply, time.monotonic()

    def _settle(self) -> list[object]:
        raised = [reply for reply in self._replies.values() if isinstance(reply, Raised)]
        self.is_in_step = not raised or (len(raised) == len(self._replies) and len({each.likeness for each in raised}) == 1)
        if error := self._raised():
            raise error
        return [reply.value for _, reply in sorted(self._replies.items()) if isinstance(reply, Returned)]

    def _raised(self) -> Exception | None:
        """What the first rank raised that did."""
        return unpack(self._first[1], self._first[0]) if self._first else None

    def _silent_at(self) -> float:
        return max(self._begun_at, *(beat.at for beat in self._team.board.all())) + self._timeout_s

    def _code_at(self) -> float:
        """Until when to wait for the exit code of one that is gone."""
        gone = [member.gone_at for member in self._team.members if member.gone_at is not None]
        return min(gone) + CODE_TIMEOUT_S if gone else float("inf")

    def _raise_if_dead(self, now: float) -> None:
        team = self._team
        if self._is_closing():
            raise RankDiedError(f"the ranks were closed during {self._what}")
        dead = next((member for member in team.members if member.code is not None), None)
        if dead is None and (team.server_is_gone or now >= self._code_at()):
            dead = next((member for member in team.members if member.gone_at is not None), team.members[0])
        if dead is not None:
            raise RankDiedError(died(dead, self._what, team, now)) from self._raised()

    def _give_up(self, now: float) -> None:
        if error := self._raised():
            raise error
        self._team.dump_stacks()
        raise RankHungError(hung(self._what, self._team, set(self._replies), self._timeout_s, now))


def died(member: Member, what: str, team: Team, now: float) -> str:
    """Words for the end of a rank."""
    return (
        f"rank {member.rank} of {len(team.members)} (pid {member.pid}) {_end_of(member)} during {what}; "
        f"its last beat was {_shown(team.board.read(member.rank), now)}; {NEXT}"
    )


def _end_of(member: Member) -> str:
    if member.code is None:
        return "is gone, its end unknown, as the fork server is gone too,"
    if member.code >= 0:
        return f"ended with exit code {member.code}"
    if member.code == -SIGKILL:
        return "was killed by SIGKILL (by hand, or as memory ran out)"
    with suppress(ValueError):
        return f"was killed by {Signals(-member.code).name}"
    return f"was killed by signal {-member.code}"


def hung(what: str, team: Team, answered: set[int], timeout_s: float, now: float) -> str:
    """Words for a silence: who is behind, and what each did last."""
    waiting = [member for member in team.members if member.rank not in answered]
    beats = {member.rank: team.board.read(member.rank) for member in team.members}
    order = sorted(waiting, key=lambda each: (not _is_stopped(each.pid), beats[each.rank].count, beats[each.rank].at))
    behind = order[0]
    state = "stopped by a signal" if _is_stopped(behind.pid) else "behind"
    lines = [f"rank {each.rank} (pid {each.pid}) {_shown(beats[each.rank], now)}" for each in order[:SHOWN]]
    lines += [f"{len(order) - SHOWN} more wait"] if len(order) > SHOWN else []
    lines += [f"{len(answered)} ranks have answered"] if answered else []
    return (
        f"no rank gave a sign of life for cluster.rank_timeout_s = {timeout_s:g} s during {what}; rank {behind.rank} is {state}: "
        f"{'; '.join(lines)}; their stacks are on stderr; "
        f"raise the key if a step takes that long; {NEXT}"
    )


def _shown(beat: Beat, now: float) -> str:
    return f"'{beat.text}' {now - beat.at:.1f} s ago" if beat.count else "none"


def _is_stopped(pid: int) -> bool:
    """By SIGSTOP or a debugger, where the system shows it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
