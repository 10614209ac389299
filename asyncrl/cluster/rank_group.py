"""The controller's hold on its ranks: start, call all alike, close. Blocking; the world's `model` thread calls it.

training.ranks -> [rank_group] -> exchange (one call) -> rank_main

State: made -> alive -> dead. One failure is enough for dead: ranks that are out of step cannot be asked again.
"""

import os
import sys
import threading

from asyncrl.cluster import wire
from asyncrl.cluster.arena import Arena
from asyncrl.cluster.exchange import Exchange
from asyncrl.cluster.fork_server import ForkServer
from asyncrl.cluster.rank_main import Call, Dropped, Hello, NewBlock
from asyncrl.cluster.team import Team, fork
from asyncrl.errors import RankDiedError
from asyncrl.wording import message_of

START_TIMEOUT_S = 120.0
"""The least that a start gets without a sign of life: importing torch and transformers takes seconds, on a busy machine many."""
GRACE_S = 5.0
"""After the first exception of a rank, for the others to raise alike or to answer. Ranks that only wait for it never would."""


class RankGroup:
    """`num_ranks` processes that each serve what `target` ("module:function") makes: `function(rank: Rank, payload)`.

    timeout_s: seconds without a sign of life of any rank after which a call ends. server: a fork server that is shared (it stays
    the caller's); None: one of its own, which imports the target's module once for all ranks.
    """

    def __init__(
        self,
        num_ranks: int,
        target: str,
        *,
        timeout_s: float,
        num_threads: int = 1,
        server: ForkServer | None = None,
        grace_s: float = GRACE_S,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._num_ranks, self._target = num_ranks, target
        self._timeout_s, self._num_threads, self._grace_s = timeout_s, num_threads, grace_s
        self._start_timeout_s = max(timeout_s, start_timeout_s)
        self._server, self._owns_server = server, server is None
        self._team: Team | None = None
        self._using = threading.Lock()  # one call at a time; close() waits for the end of the one that it breaks off
        self._is_closing = threading.Event()
        self._why_dead = ""
        self.arena = Arena()
        """Where columns for the ranks are placed."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the ranks, in rank order; empty before `start` and after the end."""
        team = self._team
        return tuple(member.pid for member in team.members) if team else ()

    def start(self, payload: object) -> None:
        """Start the ranks and let each make what it serves; payload is small plain data, the same for all.

        Raises what the target raised, RankDiedError, RankHungError; RankError without shared memory. No rank is left then.
        """
        with self._using:
            assert self._team is None, "a group is started once"
            if self._why_dead:
                raise RankDiedError(f"the ranks cannot be started: {self._why_dead}")
            try:
                self._exchange("start", self._greet(payload), self._start_timeout_s)
            except BaseException as error:
                self._end(f"they failed to start: {message_of(error)}")
                raise

    def _greet(self, payload: object) -> Team:
        self._server = self._server or ForkServer([self._target.partition(":")[0]])
        self._team, beats_fd, store = fork(self._server, self._num_ranks)
        try:
            for member in self._team.members:
                hello = Hello(
                    rank=member.rank,
                    world=self._num_ranks,
                    target=self._target,
                    payload=wire.encode(payload),
                    timeout_s=self._timeout_s,
                    num_threads=self._num_threads,
                    path=tuple(sys.path),
                    folder=os.getcwd(),
                    store=store,
                )
                self._team.put_one(member, wire.encode(hello), [beats_fd])
        finally:
            os.close(beats_fd)
        return self._team

    def call(self, method: str, *args: object, **kwargs: object) -> list[object]:
        """What the method of each rank's served object returned, in rank order. Columns go through `arena`, not through here.

        Raises the ranks' own exception; RankDiedError, RankHungError. But for an exception that all ranks raised alike, the group
        is dead after any of these, and every later call raises RankDiedError.
        """
        with self._using:
            if self._team is None or self._why_dead:
                raise RankDiedError(f"the ranks cannot do {method}: {self._why_dead or 'they were not started'}")
            frame = wire.encode(Call(method=method, arguments=wire.encode((args, kwargs))))
            self._tell_news(self._team)
            self._team.put(frame)
            return self._exchange(method, self._team, self._timeout_s)

    def _tell_news(self, team: Team) -> None:
        news = self.arena.news()
        if news.dropped:
            team.put(wire.encode(Dropped(numbers=news.dropped)))
        for number, size, fd in news.blocks:
            team.put(wire.encode(NewBlock(number=number, size=size)), [fd])
            os.close(fd)

    def _exchange(self, what: str, team: Team, timeout_s: float) -> list[object]:
        exchange = Exchange(team, what, timeout_s=timeout_s, grace_s=self._grace_s, is_closing=self._is_closing.is_set)
        try:
            return exchange.run()
        except BaseException as error:
            if not exchange.is_in_step:
                self._end(f"they were ended when {what} failed: {message_of(error)}")
            raise

    def _end(self, why: str) -> None:
        """Kill and reap. `_using` is held."""
        self._why_dead = self._why_dead or why
        team, self._team = self._team, None
        if team is not None:
            team.close()
        if self._owns_server and self._server is not None:
            self._server.close()
        self.arena.close()

    def close(self) -> None:
        """End the ranks and wait until they are gone. From any thread; a call that is under way ends with RankDiedError. Twice is
        once."""
        self._is_closing.set()
        if team := self._team:
            team.break_off()
        with self._using:
            self._end("they were closed")
