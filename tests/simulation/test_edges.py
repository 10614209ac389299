"""What the edges say and how long they take: distributions, what a session says, tools of both kinds, several calls a turn."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from asyncrl.agents.tool_calls import HermesFormat, ToolCall
from asyncrl.config import load_run, parse_run
from asyncrl.config.distribution import Distribution
from asyncrl.config.simulation import Scenario
from asyncrl.ports import GenerateRequest, SamplingParams, StopReason
from asyncrl.simulation.draws import draw_count, draw_of, unit
from asyncrl.simulation.edges.rows import SimRows
from asyncrl.simulation.edges.sampler import Answer, Sampler
from asyncrl.simulation.edges.template import END, SimTemplate
from asyncrl.simulation.run import Outcome, simulate

SCENARIOS = Path(__file__).parents[2] / "configs" / "sim"


def scenario_of(name: str, *overrides: str) -> Scenario:
    return load_run(Scenario, SCENARIOS / f"{name}.toml", overrides)


def draws(distribution: Distribution, number: int = 20_000) -> list[float]:
    draw = draw_of(distribution)
    return [draw(unit(1, position)) for position in range(number)]


# --- distributions ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distribution", "mean", "deviation"),
    [
        (Distribution(value=3), 3.0, 0.0),
        (Distribution(kind="uniform", low=2, high=6), 4.0, 4 / 12**0.5),
        (Distribution(kind="exponential", mean=5), 5.0, 5.0),
        (Distribution(kind="lognormal", mean=5, cv=0.5), 5.0, 2.5),
        (Distribution(kind="lognormal", mean=7, cv=0), 7.0, 0.0),
        (Distribution(kind="lognormal", mean=0, cv=1), 0.0, 0.0),
        (Distribution(kind="empirical", values=(1, 1, 4)), 2.0, 2**0.5),
    ],
    ids=lambda value: value.kind if isinstance(value, Distribution) else "",
)
def test_mean_and_deviation_are_as_asked(distribution: Distribution, mean: float, deviation: float) -> None:
    found = draws(distribution)
    assert fmean(found) == pytest.approx(mean, rel=0.03)
    assert pstdev(found) == pytest.approx(deviation, rel=0.06, abs=1e-9)
    assert min(found) >= 0


def test_the_ends_of_the_unit_interval_are_numbers() -> None:
    for kind in (Distribution(kind="exponential", mean=1), Distribution(kind="lognormal", mean=1, cv=2)):
        draw = draw_of(kind)
        assert 0 <= draw(0.0) < draw(0.5) < draw(1 - 2**-53) < 1e6


def test_an_empirical_file_is_drawn_from(tmp_path: Path) -> None:
    path = tmp_path / "numbers.txt"
    path.write_text("1\n2.5\n\n7\n")
    assert set(draws(Distribution(kind="empirical", file=str(path)), 200)) == {1.0, 2.5, 7.0}


def test_counts_are_whole_at_least_one_and_uniform_has_both_ends() -> None:
    def counts(distribution: Distribution) -> Counter[int]:
        return Counter(draw_count(distribution, unit(2, position)) for position in range(6000))

    found = counts(Distribution(kind="uniform", low=2, high=4))
    assert set(found) == {2, 3, 4}
    assert max(found.values()) < 1.15 * min(found.values())
    assert set(counts(Distribution(value=0))) == {1}
    assert min(counts(Distribution(kind="exponential", mean=0.5))) == 1


# --- what a session says ----------------------------------------------------------------------------------------------------------


def request(
    *, turn: int = 0, session: int = 0, seed: int = 5, max_tokens: int = 10_000, stops: Sequence[int] = ()
) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stops))
    return GenerateRequest(request_id=f"abc_{session}_{turn}", prompt_ids=[9, 9, 1], sampling=sampling, seed=seed)


def test_an_answer_depends_on_its_request_alone() -> None:
    scenario = scenario_of("tools")
    asked = [request(turn=turn, session=session, seed=100 * session + turn) for turn in range(3) for session in range(5)]
    first = [Sampler(scenario).answer(each, 10_000) for each in asked]
    shuffled = random.Random(0).sample(asked, len(asked))
    sampler = Sampler(scenario)
    again = {each.request_id: sampler.answer(each, 10_000) for each in shuffled}
    assert [again[each.request_id] for each in asked] == first
    assert len({tuple(answer.ids) for answer in first}) == len(first)


def calls_of(answer: Answer, names: Sequence[str]) -> list[str]:
    parsed = HermesFormat().parse(SimTemplate(names).decode_turn(answer.ids))
    assert all(isinstance(call, ToolCall) for call in parsed.calls)
    return [call.name for call in parsed.calls if isinstance(call, ToolCall)]


def test_tools_are_called_by_their_weights_and_as_many_a_turn_as_drawn() -> None:
    scenario = scenario_of("tools", "sim.sessions.turns=2")
    names = [tool.name for tool in scenario.sim.tools]
    sampler = Sampler(scenario)
    turns = [calls_of(sampler.answer(request(seed=seed), 10_000), names) for seed in range(3000)]
    assert set(map(len, turns)) == {1, 2}
    shares = Counter(name for turn in turns for name in turn)
    total = shares.total()
    assert [shares[name] / total for name in names] == pytest.approx([5 / 9, 3 / 9, 1 / 9], abs=0.03)
    assert calls_of(sampler.answer(request(turn=1), 10_000), names) == [], "the last turn calls nothing"


def test_without_parallel_calls_a_turn_ends_with_its_only_call() -> None:
    scenario = scenario_of("reference")
    answer = Sampler(scenario).answer(request(stops=[END, 4]), 10_000)
    assert (calls_of(answer, ["search"]), answer.ids[-1], answer.stop_reason) == (["search"], 4, StopReason.STOP)


@pytest.mark.parametrize(
    ("max_tokens", "room", "stops", "reason"),
    [(3, 50, (), StopReason.LENGTH), (50, 3, (), StopReason.CONTEXT), (50, 50, (END,), StopReason.STOP)],
)
def test_budgets_cut_an_answer_and_its_tokens(max_tokens: int, room: int, stops: tuple[int, ...], reason: StopReason) -> None:
    sessions = {"turn_len": 12, "tokens_per_id": 2}
    scenario = parse_run(Scenario, {"trainer": {"total_training_steps": 1}, "sim": {"sessions": sessions}})
    answer = Sampler(scenario).answer(request(max_tokens=max_tokens, stops=stops), room)
    assert answer.stop_reason is reason
    assert (len(answer.ids), answer.num_tokens) == ((6, 12) if reason is StopReason.STOP else (3, 6))
    assert answer.num_prompt_tokens == 6


def test_no_prompt_is_longer_than_the_run_allows() -> None:
    scenario = scenario_of("reference", "sim.prompts.prompt_len=1000")
    row = SimRows(scenario)[3]
    assert len(SimTemplate([]).prompt_ids(row["raw_prompt"])) == scenario.data.max_prompt_length


# --- whole runs -------------------------------------------------------------------------------------------------------------------


def run_of(name: str, *overrides: str) -> Outcome:
    outcome = simulate(scenario_of(name, *overrides), seed=0)
    if outcome.failure is not None:
        raise outcome.failure
    return outcome


def test_tools_of_both_kinds_and_calls_at_the_same_time() -> None:
    overrides = ["data.train_batch_size=4", "trainer.total_training_steps=1"]
    numbers = run_of("tools", *overrides).watcher.steps[-1]
    assert numbers["agents/tools/ok"] > 40
    assert numbers["agents/tools/error"] == numbers["agents/tools/timeout"] == 0


def test_slower_engines_tools_and_training_take_longer() -> None:
    """Each knob turns something."""
    usual_s = run_of("smallest").seconds
    knobs = [
        "sim.engine.decode_step_s=0.5",
        "sim.engine.prefill_call_s=0.5",
        "sim.tools.0.latency_s=5",
        "sim.reward.latency_s=5",
        "sim.training.update_call_s=5",
        "sim.training.stage_s=1",
        "sim.training.publish_s=5",
        "sim.training.save_s=5",
        "sim.journal.commit_s=0.5",
        "sim.times.turn_overhead_s=1",
        "sim.times.offload_s=0.5",
    ]
    slower = {knob: run_of("smallest", knob).seconds for knob in knobs}
    assert [knob for knob, seconds in slower.items() if seconds < usual_s + 0.8] == []


@pytest.mark.parametrize("max_staleness", [1, 2])
@pytest.mark.parametrize("name", ["smallest", "reference"])
def test_with_staleness_weights_are_published_under_way_and_no_token_is_older_than_allowed(name: str, max_staleness: int) -> None:
    """The oracles hold, and the trainer's own check of every token."""
    usual = run_of(name, "trainer.total_training_steps=6", "sim.training.save_s=0")
    ahead = run_of(
        name,
        "trainer.total_training_steps=6",
        "sim.training.save_s=0",
        "trainer.mode=async",
        f"trainer.max_staleness={max_staleness}",
        "trainer.invariants=all",
    )
    assert ahead.machine.is_finished
    assert ahead.seconds < usual.seconds, "groups are made while the actor learns"
