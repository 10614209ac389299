"""Continuous batching: which rows hold slots, and what the next forward is. Plain synchronous code, run by the engine's thread.

waiting -> [slot] -> prefill -> decode, decode, ... -> outcome

Invariants: 1 active rows hold the slots 0..n-1, so a step costs what its rows cost; 2 a slot without a row is zero; 3 weights
change between two steps only, and then every row's keys are computed anew before it samples again, so no step sees two versions;
4 every ticket submitted gets exactly one outcome, unless it was cancelled.
"""

import math
import time
from collections import Counter, deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from asyncrl.errors import EngineError
from asyncrl.ports import GenerateRequest, Generation
from asyncrl.rollout.batch import Batch
from asyncrl.rollout.model_runner import MAX_PREFILL_TOKENS, ModelRunner
from asyncrl.rollout.requests import Row
from asyncrl.rollout.stopping import StopRules
from asyncrl.rollout.work_sums import WorkSums

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a ticket."""

    ticket: int
    result: Generation | EngineError


class Scheduler:
    """Rows, slots and weight version of one engine."""

    def __init__(self, runner: ModelRunner, *, max_num_seqs: int, version: int, rules: StopRules) -> None:
        self._runner = runner
        self._rules = rules
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []  # the row in slot i
        self._batch: Batch | None = None  # of all rows, while nobody joins, leaves or is recomputed
        self.max_num_seqs = max_num_seqs
        self.version = version
        self.beats = 0
        """Forwards so far."""
        self.counters: Counter[str] = Counter()
        self.decoding = WorkSums()
        """Decode steps with their sampling; size: rows of the forward."""
        self.prefilling = WorkSums()
        """Prefills with their sampling; size: tokens of the forward."""

    @property
    def has_work(self) -> bool:
        return bool(self._rows or self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, ticket: int, request: GenerateRequest) -> None:
        """Queue a request that `check_request` has let through."""
        prompt = list(request.prompt_ids)
        rule = self._rules.rule(request.sampling, len(prompt))
        self._waiting.append(Row(ticket=ticket, request=request, rule=rule, ids=prompt))

    def cancel(self, ticket: int) -> None:
        """Forget a request and free its slot. A ticket that is done already is no error: its outcome crossed the cancellation."""
        for row in self._waiting:
            if row.ticket == ticket:
                self._waiting.remove(row)
                self.counters["cancelled"] += 1
                return
        for slot, row in enumerate(self._rows):
            if row.ticket == ticket:
                self._free([slot])
                self.counters["cancelled"] += 1
                return

    def load(self, version: int, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Swap the weights. Raises EngineError, with nothing changed, for a version that falls or a snapshot that does not fit."""
        if version < self.version:
            raise EngineError(f"cannot publish version {version}: the engine already has version {self.version}")
        self._runner.load(tensors)
        self.version = version
        self.counters["publications"] += 1
        for row in self._rows:
            row.in_cache = False

    def step(self) -> list[Outcome]:
        """Fill free slots, bring every row's keys up to date, and sample at least one token a row."""
        outcomes: list[Outcome] = []
        self._admit()
        while group := self._next_prefill():
            outcomes += self._prefill(group)
        if self._rows:
            outcomes += self._decode()
        return outcomes

    def _admit(self) -> None:
        while self._waiting and len(self._rows) < self.max_num_seqs:
            self._rows.append(self._waiting.popleft())

    def _next_prefill(self) -> list[int]:
        """Slots of the next prefill forward: equal prompts together, then shorter with shorter, within the token budget."""
        stale = [slot for slot, row in enumerate(self._rows) if not row.in_cache]
        if not stale:
            return []
        prompts = {slot: tuple(self._rows[slot].ids) for slot in stale}
        stale.sort(key=lambda slot: (len(prompts[slot]), prompts[slot]))
        num_prompts, end = 1, 1
        for before, slot in pairwise(stale):
            num_prompts += prompts[slot] != prompts[before]
            if num_prompts > 1 and (self._runner.deterministic or num_prompts * len(prompts[slot]) > MAX_PREFILL_TOKENS):
                break
            end += 1
        return stale[:end]

    def _prefill(self, slots: list[int]) -> list[Outcome]:
        began_s = time.perf_counter()
        rows = [self._rows[slot] for slot in slots]
        self._batch = None
        self.counters["recomputed_rows"] += sum(row.num_new > 0 for row in rows)
        logits = self._runner.prefill([row.ids for row in rows], slots)
        self.beats += 1
        for row in rows:
            row.in_cache = True
        outcomes = self._extend(slots, Batch(rows), logits)
        self.prefilling.add(self._runner.forward_tokens, time.perf_counter() - began_s)
        return outcomes

    def _decode(self) -> list[Outcome]:
        began_s = time.perf_counter()
        batch = self._batch or Batch(self._rows)
        self._batch = batch
        outcomes = self._extend(range(len(self._rows)), batch, self._runner.decode(batch.tokens, batch.positions))
        self.beats += 1
        self.decoding.add(self._runner.forward_tokens, time.perf_counter() - began_s)
        return outcomes

    def _extend(self, slots: list[int] | range, batch: Batch, logits: "torch.Tensor") -> list[Outcome]:
        """Give each row its next token; rows that are done leave their slots."""
        done: dict[int, Outcome] = {}
        for slot, token, log_prob in zip(slots, *batch.sample(logits), strict=True):
            result = self._append(self._rows[slot], token, log_prob)
            if result is not None:
                done[slot] = Outcome(ticket=self._rows[slot].ticket, result=result)
        self._free(list(done))
        return list(done.values())

    def _append(self, row: Row, token: int, log_prob: float) -> Generation | EngineError | None:
        if not math.isfinite(log_prob):
            return EngineError(f"request {row.request.request_id!r}: logits are not finite at weight version {self.version}")
        self.counters["generated_tokens"] += 1
        reason = row.append(token, log_prob, self.version)
        return None if reason is None else row.generation(reason)

    def _free(self, slots: list[int]) -> None:
        """Take rows out; the last rows move into the gaps, and what they leave is zeroed."""
        if slots:
            self._batch = None
        for slot in sorted(slots, reverse=True):
            last = len(self._rows) - 1
            row = self._rows.pop()
            if slot != last:
                self._rows[slot] = row
                self._runner.cache.move(last, slot)
            self._runner.cache.clear(last)
