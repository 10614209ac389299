"""One simulated engine that takes rows in as the embedded one does: between two steps, all that wait together.

SimEngine -> take -> [BatchingEngine] -> row.future; `sim.engine.prefill_tokens` chooses it

What `slots.Engine` leaves out, and a fit to a real engine needs: a row waits for the end of the step under way; rows that join at
one border share prefills, equal prompts computed once and shorter ones padded; a prefill gives each row its first token, so a row
of n tokens is in n - 1 decode steps. It counts its work as the embedded engine does.
"""

from collections import Counter
from collections.abc import Iterable
from math import ceil

from asyncrl.config.simulation import SimEngineConfig
from asyncrl.ports import World
from asyncrl.rollout.work_sums import WorkSums
from asyncrl.simulation.edges.slots import Engine, Row
from asyncrl.simulation.seams import Seams

_BORDER = 1e-6
"""Share of a step within which a number of steps is whole, whatever its last digits say."""


class BatchingEngine(Engine):
    """`_filled_at`: the step before which rows joined last."""

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
        super().__init__(number, config, slots, world, seams, version=version, name=name)
        self.decoding, self.prefilling = WorkSums(), WorkSums()
        self._filled_at = -1.0

    def take(self, row: Row) -> None:
        self._waiting.append(row)
        self.num_waiting += 1
        self._advance()
        self._set_timer()

    def _next_event(self) -> float | None:
        ends = self._running[0].end if self._running else None
        if not self.num_waiting or self.num_running >= self._slots:
            return ends
        border = max(ceil(self._steps - _BORDER), self._filled_at + 1) if self._running else self._steps
        return border if ends is None else min(ends, border)

    def _advance(self) -> None:
        now, steps = self._world.now(), self._steps
        began = max(self._at, self._prefilling_until)
        super()._advance()
        if self._steps > steps:
            self.decoding.add(self.num_running, now - began, self._steps - steps)

    def _end_rows(self) -> None:
        self._advance()
        super()._end_rows()

    def _fill(self) -> None:
        """At a border: all who wait and find a slot."""
        if self._stands_still or not self._is_at_border():
            return
        rows: list[Row] = []
        while self._waiting and self.num_running < self._slots:
            row = self._waiting.popleft()
            if not row.is_gone:
                self.num_waiting -= 1
                self.num_running += 1
                rows.append(row)
        if rows:
            self._join(rows)

    def _is_at_border(self) -> bool:
        if not self.num_running:
            return True
        return self._steps > self._filled_at + 1 - _BORDER and abs(self._steps - round(self._steps)) < _BORDER

    def _join(self, rows: list[Row]) -> None:
        now = self._world.now()
        self._filled_at = self._steps
        self._prefilling_until = max(now, self._prefilling_until) + self._prefill_s(rows)
        for row in rows:
            self._start(row, self._steps - 1, now)

    def _prefill_s(self, rows: list[Row]) -> float:
        total_s = 0.0
        for num_tokens in prefill_sizes([_prompt_of(row) for row in rows], most=self._config.prefill_tokens):
            seconds = self._config.prefill_call_s + self._config.prefill_token_s * num_tokens
            self.prefilling.add(num_tokens, seconds)
            total_s += seconds
        return total_s


def _prompt_of(row: Row) -> tuple[int, int]:
    return row.answer.num_prompt_tokens, id(row) if row.prompt is None else row.prompt


def prefill_sizes(prompts: list[tuple[int, int]], *, most: int) -> list[int]:
    """Tokens of the prefills that (length, identity) of prompts take, padding included: shorter ones with shorter, equal ones once,
    no more than `most` where several share one."""
    different = sorted(set(prompts))
    sizes: list[int] = []
    number, longest = 0, 0
    for length, _ in different:
        if number and (number + 1) * length > most:
            sizes.append(number * longest)
            number = 0
        number, longest = number + 1, length
    return [*sizes, number * longest] if number else sizes


def work_of(engines: Iterable[Engine]) -> dict[str, float]:
    """The counters of an embedded engine, added up over engines; of engines that count, the others have none."""
    total: Counter[str] = Counter()
    for engine in engines:
        if isinstance(engine, BatchingEngine):
            total.update(engine.prefilling.stats("prefill", "calls", "tokens"))
            total.update(engine.decoding.stats("decode", "steps", "rows"))
    return dict(total)
