"""One simulated engine: slots, a prefill that the other rows wait for, and decode steps that grow with their rows.

SimEngines -> take -> [Engine] -> row.future

A decode step of b rows takes `decode_step_s + decode_row_s x b`, so every running row has seen the same number of steps: one
counter of steps an engine and one timer for its next row to end, whatever the number of tokens. Invariants:
1. No more rows run than there are slots; rows get them in the order in which they came.
2. A row that leaves (its caller was cancelled) frees its slot, or its place in the queue, at once.
3. A token is of the version under which its step began.
4. An engine that hangs makes no step and takes no row in, and a call that is lost is never answered, whatever its engine does.
"""

import asyncio
import heapq
from collections import deque
from math import ceil, inf

from asyncrl.config.simulation import SimEngineConfig
from asyncrl.errors import EngineError
from asyncrl.ports import VersionSpan, World
from asyncrl.simulation.edges.sampler import Answer
from asyncrl.simulation.seams import Seams


class Row:
    """One request on its way. `marks`: (steps of its engine, version) from which its tokens are of that version. `prompt`: the same
    for equal prompts; None: like no other. `is_lost`: it never ends by itself."""

    __slots__ = ("answer", "began_s", "begin", "end", "future", "has_slot", "is_gone", "is_lost", "marks", "prompt")

    def __init__(self, answer: Answer, future: "asyncio.Future[None]", prompt: int | None = None) -> None:
        self.answer = answer
        self.future = future
        self.prompt = prompt
        self.begin = self.end = self.began_s = 0.0
        self.marks: list[tuple[float, int]] = []
        self.has_slot = self.is_gone = self.is_lost = False

    def __lt__(self, other: "Row") -> bool:
        return self.end < other.end

    def spans(self) -> list[VersionSpan]:
        """In ids: the share of a row's steps is the share of its ids."""
        num_ids, steps = len(self.answer.ids), self.end - self.begin
        starts = [ceil((mark - self.begin) / steps * num_ids - 1e-9) for mark, _ in self.marks] + [num_ids]
        versions = [version for _, version in self.marks]
        pairs = zip(starts, starts[1:], versions, strict=False)
        return [VersionSpan(start=start, end=end, version=version) for start, end, version in pairs if start < end]


class Engine:
    """It dies for good. `hangs_until`: when it goes on; past, when it does not hang. `_steps`: decode steps so far, as of `_at`;
    until `_prefilling_until` none."""

    def __init__(
        self,
        number: int,
        config: SimEngineConfig,
        slots: int,
        world: World,
        seams: Seams,
        *,
        version: int,
        name: str = "engine",
    ) -> None:
        self.number = number
        self.name = f"{name} {number}"
        self.hangs_until = 0.0
        self.is_alive = True
        self.num_running = self.num_waiting = 0
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        """A heap by the step at which each row ends. Here and above, rows that are gone stay until their turn."""
        self._config = config
        self._slots = slots
        self._world = world
        self._seams = seams
        self._version = version
        self._is_paused = self._hangs = False
        self._worked = 0.0
        self._steps = self._target = 0.0
        self._at = world.now()
        self._prefilling_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def load(self) -> int:
        """Requests here."""
        return self.num_running + self.num_waiting

    @property
    def beats(self) -> float:
        """Steps so far, and rows taken in: it grows only while the engine works."""
        return self._worked + self._steps_since()

    # --- requests

    def take(self, row: Row) -> None:
        self._waiting.append(row)
        self.num_waiting += 1
        self._fill()

    def leave(self, row: Row) -> None:
        """Nobody waits for it any more. One that has ended is gone already."""
        if row.is_gone:
            return
        row.is_gone = True
        if row.has_slot:
            self._advance()
            self._free(row)
            self._fill()
            self._set_timer()
        else:
            self.num_waiting -= 1

    def die(self, reason: str) -> None:
        """Every request fails."""
        rows = [row for row in (*self._waiting, *self._running) if not row.is_gone]
        self._waiting.clear()
        self._running.clear()
        self.num_waiting = 0
        self.is_alive = False
        self._cancel_timer()
        for row in rows:
            row.is_gone = True
            if row.has_slot:
                self._free(row)
            if not row.future.done():
                row.future.set_exception(EngineError(reason))
        self._steps = 0.0

    # --- weights

    def stamp(self, version: int) -> None:
        """Decode steps from now on are of this version."""
        self._version = version
        self._advance()
        for row in self._running:
            row.marks.append((self._steps, version))

    def pause(self) -> None:
        self._advance()
        self._is_paused = True
        self._cancel_timer()

    def resume(self) -> None:
        self._advance()
        self._is_paused = False
        self._fill()
        self._set_timer()

    # --- faults

    def hang(self, seconds: float) -> None:
        """Stand still for so long, or for longer when it does so already."""
        until = self._world.now() + seconds
        if until <= self.hangs_until:
            return
        self._advance()
        self._hangs = True
        self.hangs_until = until
        self._cancel_timer()
        asyncio.get_running_loop().call_later(seconds, self._go_on, until)

    def _go_on(self, until: float) -> None:
        if until == self.hangs_until and self.is_alive:
            self._advance()
            self._hangs = False
            self._fill()
            self._set_timer()

    # --- time

    @property
    def _stands_still(self) -> bool:
        return self._is_paused or self._hangs

    def _step_s(self) -> float:
        return self._config.decode_step_s + self._config.decode_row_s * self.num_running

    def _advance(self) -> None:
        """Count the steps made since it was looked at last. To be called before the number of rows changes."""
        steps = self._steps_since()
        self._steps += steps
        self._worked += steps
        self._at = self._world.now()

    def _steps_since(self) -> float:
        """Steps made since it was looked at last."""
        now, began = self._world.now(), max(self._at, self._prefilling_until)
        step_s = self._step_s()
        if self.num_running and now > began and step_s and not self._stands_still:
            return (now - began) / step_s
        return 0.0

    def _fill(self) -> None:
        """Give free slots to who waits."""
        if self._stands_still or not self._waiting or self.num_running >= self._slots:
            return
        self._advance()
        now = self._at
        while self._waiting and self.num_running < self._slots:
            row = self._waiting.popleft()
            if row.is_gone:
                continue
            self.num_waiting -= 1
            self.num_running += 1
            seconds = self._config.prefill_call_s + self._config.prefill_token_s * row.answer.num_prompt_tokens
            self._prefilling_until = max(now, self._prefilling_until) + seconds
            self._start(row, self._steps, now)
        self._set_timer()

    def _start(self, row: Row, step: float, now: float) -> None:
        """It has a slot, and its tokens are those of the steps from `step` on."""
        row.has_slot = True
        self._worked += 1
        row.begin, row.began_s = step, now
        row.end = inf if row.is_lost else step + self._seams.slowed("generate", row.answer.num_tokens)
        row.marks.append((step, self._version))
        heapq.heappush(self._running, row)

    def _next_event(self) -> float | None:
        """The step before which something happens next: here, the end of a row. None: nothing will."""
        return self._running[0].end if self._running else None

    def _set_timer(self) -> None:
        """For what happens next."""
        self._cancel_timer()
        while self._running and self._running[0].is_gone:
            heapq.heappop(self._running)
        if not self._running:
            self._steps = 0.0  # small numbers are the exact ones
        target = self._next_event()
        if target is not None and target < inf and not self._stands_still:
            self._target = target
            stall_s = max(self._prefilling_until - self._at, 0.0)
            wait_s = stall_s + max(self._target - self._steps, 0.0) * self._step_s()
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._end_rows)

    def _end_rows(self) -> None:
        """Nothing has changed since the timer was set, so its row is at its end, whatever the clock's last digits say."""
        self._timer = None
        self._at = self._world.now()
        self._worked += max(self._target - self._steps, 0.0)
        self._steps = max(self._steps, self._target)
        while self._running and (self._running[0].is_gone or self._running[0].end <= self._steps):
            row = heapq.heappop(self._running)
            if row.is_gone:
                continue
            row.is_gone = True
            self._free(row)
            if not row.future.done():
                row.future.set_result(None)
        self._fill()
        self._set_timer()

    def _free(self, row: Row) -> None:
        self.num_running -= 1
        self._seams.busy(self.name, "row", row.began_s, self._world.now())

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
