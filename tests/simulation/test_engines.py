"""Simulated engines against a reference that follows every row by itself."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from math import ceil

import pytest

from asyncrl.config.simulation import SimEngineConfig
from asyncrl.errors import EngineError
from asyncrl.ports import StopReason
from asyncrl.simulation.edges.sampler import Answer
from asyncrl.simulation.edges.slots import Engine, Row
from asyncrl.simulation.events import EventLog
from asyncrl.simulation.loop import Order, VirtualLoop
from asyncrl.simulation.seams import Seams
from asyncrl.simulation.world import SimWorld

# --- one engine, followed row by row ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Request:
    """`cancel_s`: after its arrival; None: never."""

    at_s: float
    num_prompt_tokens: int
    num_tokens: int
    num_ids: int
    cancel_s: float | None


@dataclass(frozen=True, kw_only=True)
class Story:
    """What happens to an engine: at these times."""

    config: SimEngineConfig
    slots: int
    requests: list[Request]
    published_s: list[float]
    dies_s: list[float]
    down_s: float


@dataclass(kw_only=True)
class Tale:
    """How a request ended: when, as what, and the version of each of its ids."""

    number: int
    end_s: float = -1.0
    outcome: str = ""
    versions: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class _Line:
    """A running row of the reference: what it has still to wait for its own prefill's engine, and how many tokens it has."""

    number: int
    done: float = 0.0
    marks: list[tuple[float, int]] = field(default_factory=list)


class Reference:
    """The same model, written as one would explain it: at every moment at which anything happens, each running row gets its share
    of the time that has passed. No counters of steps, no heap, no timers that are set anew."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.now = 0.0
        self.stall_s = 0.0
        self.version = 0
        self.is_up = True
        self.waiting: list[int] = []
        self.running: list[_Line] = []
        self.tales = [Tale(number=number) for number in range(len(story.requests))]

    def run(self) -> list[Tale]:
        events = self._events()
        while events or self.running or self.waiting:
            end_s = self._next_end()
            if events and (end_s is None or events[0][0] <= end_s):
                at_s, _, what, number = events.pop(0)
                self._pass_to(at_s)
                self._happen(what, number)
            else:
                assert end_s is not None
                self._pass_to(end_s)
            self._end_rows()
            self._fill()
        return self.tales

    def _events(self) -> list[tuple[float, int, str, int]]:
        story = self.story
        events = [(request.at_s, 3, "arrive", number) for number, request in enumerate(story.requests)]
        for number, request in enumerate(story.requests):
            if request.cancel_s is not None:
                events.append((request.at_s + request.cancel_s, 4, "cancel", number))
        events += [(at_s, 2, "publish", number + 1) for number, at_s in enumerate(story.published_s)]
        events += [(at_s, 1, "die", 0) for at_s in story.dies_s] + [(at_s + story.down_s, 0, "back", 0) for at_s in story.dies_s]
        return sorted(events)

    def _step_s(self) -> float:
        return self.story.config.decode_step_s + self.story.config.decode_row_s * len(self.running)

    def _next_end(self) -> float | None:
        left = [self.story.requests[line.number].num_tokens - line.done for line in self.running]
        return self.now + self.stall_s + min(left) * self._step_s() if left else None

    def _pass_to(self, at_s: float) -> None:
        passed = at_s - self.now
        stalled = min(passed, self.stall_s)
        self.stall_s -= stalled
        for line in self.running:
            line.done += (passed - stalled) / self._step_s()
        self.now = at_s

    def _happen(self, what: str, number: int) -> None:
        if what == "arrive":
            if self.is_up:
                self.waiting.append(number)
            else:
                self._end(number, "refused")
        elif what == "publish":
            self.version = number
            for line in self.running:
                line.marks.append((line.done, number))
        elif what == "cancel" and not self.tales[number].outcome:
            self.waiting = [other for other in self.waiting if other != number]
            self.running = [line for line in self.running if line.number != number]
            self._end(number, "cancelled")
        elif what == "die":
            for number in [*self.waiting, *(line.number for line in self.running)]:
                self._end(number, "died")
            self.waiting, self.running, self.stall_s, self.is_up = [], [], 0.0, False
        elif what == "back":
            self.is_up = True

    def _end_rows(self) -> None:
        for line in list(self.running):
            request = self.story.requests[line.number]
            if line.done >= request.num_tokens * (1 - 1e-12) - 1e-9:
                self.running.remove(line)
                self._end(line.number, "ok")
                share = request.num_ids / request.num_tokens
                self.tales[line.number].versions = [_version_of(place, line, share) for place in range(request.num_ids)]

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.story.slots:
            number = self.waiting.pop(0)
            config = self.story.config
            self.stall_s += config.prefill_call_s + config.prefill_token_s * self.story.requests[number].num_prompt_tokens
            self.running.append(_Line(number=number, marks=[(0.0, self.version)]))

    def _end(self, number: int, outcome: str) -> None:
        self.tales[number].end_s, self.tales[number].outcome = self.now, outcome


def _version_of(place: int, line: _Line, share: float) -> int:
    """The last version that was there when this id's steps began."""
    return [version for done, version in line.marks if ceil(done * share - 1e-9) <= place][-1]


class Told:
    """The engine under test, in a virtual loop; checks after every turn what must never be."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.tales = [Tale(number=number) for number in range(len(story.requests))]
        self.loop = VirtualLoop(0, order=Order.STRICT)
        self.world = SimWorld(self.loop, run_seed=0, log=EventLog())
        self.version = 0
        self.engine = self._new_engine()
        self.loop.after_turn = self._check

    def _new_engine(self) -> Engine:
        return Engine(0, self.story.config, self.story.slots, self.world, Seams(), version=self.version)

    def _replace(self) -> None:
        """By one with the newest weights, as a pool does."""
        self.engine = self._new_engine()

    def _stamp(self, version: int) -> None:
        self.version = version
        self.engine.stamp(version)

    def _check(self) -> None:
        assert 0 <= self.engine.num_running <= self.story.slots
        assert self.engine.num_waiting >= 0
        if self.engine.num_waiting and self.engine.is_alive:
            assert self.engine.num_running == self.story.slots, "a slot is free while a row waits"

    def run(self) -> list[Tale]:
        self.loop.run_until_complete(self._run())
        self.loop.close()
        return self.tales

    async def _run(self) -> None:
        for at_s in self.story.dies_s:
            self.loop.call_at(at_s + self.story.down_s, self._replace)
        for at_s in self.story.dies_s:
            self.loop.call_at(at_s, self.engine.die, "it died")
        for number, at_s in enumerate(self.story.published_s):
            self.loop.call_at(at_s, self._stamp, number + 1)
        tasks = [asyncio.create_task(self._generate(tale)) for tale in self.tales]
        await asyncio.gather(*tasks)
        assert self.engine.load == 0

    async def _generate(self, tale: Tale) -> None:
        request = self.story.requests[tale.number]
        await asyncio.sleep(request.at_s)
        answer = Answer(
            ids=list(range(request.num_ids)),
            num_tokens=request.num_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            log_prob=-1.0,
            stop_reason=StopReason.STOP,
        )
        row, engine = Row(answer, self.loop.create_future()), self.engine
        try:
            if engine.is_alive:
                async with asyncio.timeout(request.cancel_s):
                    engine.take(row)
                    try:
                        await row.future
                    finally:
                        engine.leave(row)
                tale.outcome = "ok"
                tale.versions = [span.version for span in row.spans() for _ in range(span.start, span.end)]
            else:
                tale.outcome = "refused"
        except TimeoutError:
            tale.outcome = "cancelled"
        except EngineError:
            tale.outcome = "died"
        tale.end_s = self.loop.time()


def story_of(seed: int) -> Story:
    """Arrivals, lengths, cancellations, publications and a death at random moments, no two of which are the same."""
    rng = random.Random(seed)

    def second() -> float:
        return rng.uniform(0.001, 20.0)

    def request() -> Request:
        return Request(
            at_s=second(),
            num_prompt_tokens=rng.randrange(300),
            num_tokens=rng.randint(1, 400),
            num_ids=rng.randint(1, 12),
            cancel_s=second() if rng.random() < 0.3 else None,
        )

    config = SimEngineConfig(
        decode_step_s=rng.uniform(1e-4, 0.05),
        decode_row_s=rng.choice([0.0, 1e-4, 0.01]),
        prefill_call_s=rng.choice([0.0, 0.01, 0.5]),
        prefill_token_s=rng.choice([0.0, 1e-3]),
    )
    return Story(
        config=config,
        slots=rng.randint(1, 5),
        requests=[request() for _ in range(rng.randint(1, 14))],
        published_s=sorted(second() for _ in range(rng.randint(0, 4))),
        dies_s=[second()] if rng.random() < 0.4 else [],
        down_s=rng.uniform(0.5, 3.0),
    )


@pytest.mark.parametrize("block", range(4))
def test_every_row_ends_when_and_as_the_reference_says(block: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(block * 100, block * 100 + 100):
        story = story_of(seed)
        for wanted, tale in zip(Reference(story).run(), Told(story).run(), strict=True):
            assert (tale.outcome, tale.versions) == (wanted.outcome, wanted.versions), f"seed {seed}: request {tale.number}"
            assert tale.end_s == pytest.approx(wanted.end_s, rel=1e-6), f"seed {seed}: request {tale.number}"
            outcomes[tale.outcome] += 1
            outcomes["of several versions"] += len(set(tale.versions)) > 1
    assert all(outcomes[name] >= 5 for name in ("ok", "cancelled", "died", "refused", "of several versions")), outcomes


def test_a_publication_while_a_row_runs_stamps_the_tokens_that_begin_after_it() -> None:
    config = SimEngineConfig(decode_step_s=1.0, decode_row_s=0.0, prefill_call_s=0.0, prefill_token_s=0.0)
    request = Request(at_s=0.0, num_prompt_tokens=1, num_tokens=10, num_ids=10, cancel_s=None)
    story = Story(config=config, slots=1, requests=[request], published_s=[3.5, 8.0], dies_s=[], down_s=1.0)
    (tale,) = Told(story).run()
    assert (tale.end_s, tale.versions) == (10.0, [0] * 4 + [1] * 4 + [2] * 2)


def test_decoding_that_takes_no_time_ends_at_once() -> None:
    config = SimEngineConfig(decode_step_s=0.0, decode_row_s=0.0, prefill_call_s=0.0, prefill_token_s=0.0)
    request = Request(at_s=1.0, num_prompt_tokens=1, num_tokens=10, num_ids=10, cancel_s=None)
    told = Told(Story(config=config, slots=1, requests=[request] * 3, published_s=[], dies_s=[], down_s=1.0))
    assert [(tale.end_s, tale.outcome) for tale in told.run()] == [(1.0, "ok")] * 3


def test_more_rows_than_saturate_an_engine_bring_nothing() -> None:
    """Where rows outweigh the step, twice as many at once take twice as long."""
    config = SimEngineConfig(decode_step_s=0.0, decode_row_s=0.01, prefill_call_s=0.0, prefill_token_s=0.0)
    request = Request(at_s=0.0, num_prompt_tokens=1, num_tokens=100, num_ids=4, cancel_s=None)

    def seconds(rows: int) -> float:
        story = Story(config=config, slots=rows, requests=[request] * rows, published_s=[], dies_s=[], down_s=1.0)
        return max(tale.end_s for tale in Told(story).run())

    assert [seconds(rows) for rows in (1, 2, 4)] == pytest.approx([1.0, 2.0, 4.0])
