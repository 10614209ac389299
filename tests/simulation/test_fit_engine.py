"""The simulated engine that joins rows between two steps, against the embedded engine's own scheduler and against plain sums."""

import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.simulation import Scenario, SimEngineConfig
from asyncrl.ports import GenerateRequest, SamplingParams, StopReason
from asyncrl.simulation.edges.batching import BatchingEngine, prefill_sizes, work_of
from asyncrl.simulation.edges.sampler import Answer, Sampler
from asyncrl.simulation.edges.slots import Row
from asyncrl.simulation.edges.template import END
from asyncrl.simulation.events import EventLog
from asyncrl.simulation.loop import Order, VirtualLoop
from asyncrl.simulation.seams import Seams
from asyncrl.simulation.world import SimWorld

CONFIG = SimEngineConfig(decode_step_s=1.0, decode_row_s=0.1, prefill_call_s=0.5, prefill_token_s=0.01, prefill_tokens=40)


def answer_of(num_tokens: int, num_prompt_tokens: int) -> Answer:
    return Answer(
        ids=list(range(num_tokens)),
        num_tokens=num_tokens,
        num_prompt_tokens=num_prompt_tokens,
        log_prob=-1.0,
        stop_reason=StopReason.STOP,
    )


class Bench:
    """One engine in a virtual loop. requests: (arrival, prompt tokens, tokens, seconds until it is cancelled or 0, prompt)."""

    def __init__(
        self, requests: Sequence[tuple[float, int, int, float, int | None]], *, slots: int, config: SimEngineConfig = CONFIG
    ) -> None:
        self.loop = VirtualLoop(0, order=Order.STRICT)
        self.requests = requests
        world = SimWorld(self.loop, run_seed=0, log=EventLog())
        self.engine = BatchingEngine(0, config, slots, world, Seams(), version=0)
        self.slots = slots
        self.ends_s: list[float] = []
        self.rows: list[Row] = []
        self.loop.after_turn = self._check

    def _check(self) -> None:
        assert 0 <= self.engine.num_running <= self.slots
        assert self.engine.num_waiting >= 0

    def run(self) -> dict[str, float]:
        self.loop.run_until_complete(self._run())
        self.loop.close()
        return work_of([self.engine])

    async def _run(self) -> None:
        self.rows = [Row(answer_of(num, prompt), self.loop.create_future(), same) for _, prompt, num, _, same in self.requests]
        self.ends_s = await asyncio.gather(*[self._one(number) for number in range(len(self.rows))])
        assert self.engine.load == 0

    async def _one(self, number: int) -> float:
        at_s, _, _, cancel_s, _ = self.requests[number]
        await asyncio.sleep(at_s)
        row = self.rows[number]
        try:
            async with asyncio.timeout(cancel_s or None):
                self.engine.take(row)
                try:
                    await row.future
                finally:
                    self.engine.leave(row)
        except TimeoutError:
            return -1.0
        return self.loop.time()


def test_rows_that_come_together_share_a_prefill_and_get_their_first_token_there() -> None:
    bench = Bench([(0.0, 10, 4, 0.0, 7), (0.0, 10, 4, 0.0, 7), (0.0, 12, 1, 0.0, None)], slots=4)
    work = bench.run()
    # Two different prompts padded to 12: 0.5 + 24 x 0.01. Then three steps of two rows.
    prefill_s = 0.5 + 0.24
    assert bench.ends_s == pytest.approx([prefill_s + 3 * 1.2] * 2 + [prefill_s])
    assert (work["prefill_calls"], work["prefill_tokens"], work["prefill_s"]) == pytest.approx((1, 24, prefill_s))
    assert (work["decode_steps"], work["decode_rows"], work["decode_s"]) == pytest.approx((3, 6, 3.6))


def test_who_comes_during_a_step_joins_at_its_end_and_who_comes_during_a_prefill_after_the_next_step() -> None:
    bench = Bench([(0.0, 10, 5, 0.0, None), (0.3, 10, 2, 0.0, None), (1.0, 10, 2, 0.0, None)], slots=4)
    bench.run()
    # 0.6 prefill, in which the second comes; a step until 1.7, in which the third comes: both join there, in one prefill.
    joined_s = 1.7
    assert bench.rows[1].began_s == bench.rows[2].began_s == pytest.approx(joined_s)
    assert bench.ends_s[1] == pytest.approx(joined_s + 0.7 + 1.3)
    assert bench.ends_s[0] == pytest.approx(joined_s + 0.7 + 1.3 + 2 * 1.1)


def test_a_free_slot_is_taken_before_the_next_step() -> None:
    bench = Bench([(0.0, 10, 3, 0.0, None), (0.0, 10, 6, 0.0, None), (0.0, 10, 2, 0.0, None)], slots=2)
    bench.run()
    assert bench.rows[2].began_s == pytest.approx(bench.ends_s[0])


@pytest.mark.parametrize("seed", range(60))
def test_every_token_is_made_once_whatever_comes_and_goes(seed: int) -> None:
    rng = random.Random(seed)
    requests = [
        (
            rng.choice([0.0, rng.uniform(0, 30)]),
            rng.randint(1, 30),
            rng.randint(1, 9),
            rng.choice([0.0, 0.0, rng.uniform(0.1, 20)]),
            None,
        )
        for _ in range(rng.randint(1, 20))
    ]
    bench = Bench(requests, slots=rng.randint(1, 5))
    work = bench.run()
    done = [request for request, end_s in zip(requests, bench.ends_s, strict=True) if end_s >= 0]
    if all(request[3] == 0.0 for request in requests):
        assert work["decode_rows"] == pytest.approx(sum(num - 1 for _, _, num, _, _ in requests))
    assert work["decode_rows"] >= sum(num - 1 for _, _, num, _, _ in done) - 1e-6
    assert work["decode_s"] == pytest.approx(work["decode_steps"] * 1.0 + work["decode_rows"] * 0.1)
    assert work["decode_s"] + work["prefill_s"] <= max(bench.ends_s, default=0.0) + 40


def test_a_publication_is_for_the_tokens_after_it() -> None:
    bench = Bench([(0.0, 10, 5, 0.0, None)], slots=1)
    bench.loop.call_at(0.1, bench.engine.stamp, 1)  # while its prompt is computed: the first token is of the version before
    bench.loop.call_at(0.6 + 2.5 * 1.1, bench.engine.stamp, 2)
    bench.run()
    assert [(span.start, span.end, span.version) for span in bench.rows[0].spans()] == [(0, 1, 0), (1, 4, 1), (4, 5, 2)]


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), max_size=30), st.integers(1, 100))
def test_prefills_hold_what_fits(prompts: list[tuple[int, int]], most: int) -> None:
    sizes = prefill_sizes(prompts, most=most)
    different = sorted(set(prompts))
    assert sum(sizes) >= sum(length for length, _ in different)
    assert all(size <= most or size in {length for length, _ in different} for size in sizes)
    assert bool(sizes) == bool(prompts)
    # Greedy: no two neighbours would fit into one.
    lengths = [length for length, _ in different]
    assert len(sizes) <= len(lengths)
    for left, right in pairwise(sizes):
        assert left + right > 0


def test_prefills_are_those_of_the_embedded_engines_scheduler() -> None:
    assert prefill_sizes([(5, 1), (5, 1), (3, 2), (9, 3), (20, 4), (21, 5)], most=40) == [27, 20, 21]
    assert prefill_sizes([(100, 1), (100, 2)], most=40) == [100, 100]


@pytest.mark.parametrize(("last_len", "wanted"), [(3, {2: 3, 1: 9, 0: 9}), (0, {2: 9, 1: 9, 0: 9})])
def test_a_last_turn_has_a_length_of_its_own_where_one_is_given(last_len: int, wanted: dict[int, int]) -> None:
    tree = {
        "agent": {"name": "tool_agent"},
        "trainer": {"total_training_steps": 1},
        "sim": {"sessions": {"turns": 3, "turn_len": 9, "last_len": last_len}},
    }
    sampler = Sampler(Scenario.model_validate(tree))
    answers = {
        turn: sampler.answer(
            GenerateRequest(request_id=f"aa_0_{turn}", prompt_ids=[1], sampling=SamplingParams(max_tokens=99), seed=turn), 99
        )
        for turn in range(3)
    }
    assert {turn: answer.num_tokens for turn, answer in answers.items()} == wanted


def turns_of(group: str, turns_alike: float) -> list[int]:
    """Of 40 sessions of a group."""
    tree = {
        "agent": {"name": "tool_agent"},
        "trainer": {"total_training_steps": 1},
        "sim": {"sessions": {"turns": {"kind": "uniform", "low": 1, "high": 6}, "turns_alike": turns_alike}},
    }
    sampler = Sampler(Scenario.model_validate(tree))

    def is_last(session: int, turn: int) -> bool:
        sampling = SamplingParams(max_tokens=200)
        request = GenerateRequest(request_id=f"{group}_{session}_{turn}", prompt_ids=[1], sampling=sampling, seed=session)
        return sampler.answer(request, 200).ids[-1] == END

    return [next(turn + 1 for turn in range(6) if is_last(session, turn)) for session in range(40)]


def test_a_groups_sessions_have_their_number_of_turns_in_common_as_far_as_the_scenario_says() -> None:
    assert all(len(set(turns_of(group, 1.0))) == 1 for group in ("aa", "bb", "cc"))
    assert len({turns_of(group, 1.0)[0] for group in ("aa", "bb", "cc", "dd", "ee", "ff")}) > 1
    assert len(set(turns_of("aa", 0.0))) > 3
    half = turns_of("aa", 0.5)
    assert max(map(half.count, half)) > 20 - 8
    assert len(set(half)) > 2
