"""A simulated run, written as the folder of a real one and fitted, gives its own scenario back; folders that hold too little."""

import json
import re
import tomllib
from pathlib import Path
from statistics import mean

import pytest

from asyncrl.config import to_toml
from asyncrl.config.distribution import Distribution
from asyncrl.config.loading import load_run, parse_run
from asyncrl.config.simulation import Scenario, SimConfig
from asyncrl.errors import DataError, RunFolderError, UserError
from asyncrl.observe.trace_file import TraceLog
from asyncrl.ports import Json
from asyncrl.simulation.draws import draw_of
from asyncrl.simulation.fit import fit, fit_text
from asyncrl.simulation.fit.run_data import read_run
from asyncrl.simulation.run import simulate
from asyncrl.simulation.watcher import Watcher

# What is fitted: key below `sim` -> value. Lengths are such that no limit of the run cuts them.
KNOWN: dict[str, Json] = {
    "prompts": {"count": 640, "prompt_len": {"kind": "uniform", "low": 20, "high": 60}},
    "sessions": {
        "turns": {"kind": "uniform", "low": 1, "high": 4},
        "turns_alike": 0.7,
        "turn_len": {"kind": "uniform", "low": 10, "high": 40},
        "last_len": {"kind": "uniform", "low": 4, "high": 12},
    },
    "engine": {
        "decode_step_s": 0.01,
        "decode_row_s": 0.0005,
        "prefill_call_s": 0.004,
        "prefill_token_s": 0.0001,
        "prefill_tokens": 4096,
    },
    "tools": [
        {"name": "search", "weight": 3, "latency_s": {"kind": "exponential", "mean": 0.3}, "result_len": 20},
        {"name": "fast", "latency_s": 0.05, "result_len": {"kind": "uniform", "low": 2, "high": 8}},
    ],
    "reward": {"latency_s": {"kind": "uniform", "low": 0.01, "high": 0.05}},
    "training": {
        "update_call_s": 0.3,
        "update_token_s": 0.0002,
        "forward_token_s": 0.00004,
        "stage_s": 0.002,
        "snapshot_s": 0.0,
        "publish_s": 0.1,
        "save_s": 0.7,
    },
    "journal": {"commit_s": 0.003, "sync_s": 0.0},
}
OWN: dict[str, Json] = {
    "data": {"train_batch_size": 8, "max_prompt_length": 64, "max_response_length": 1024},
    "rollout": {"n": 4, "max_num_seqs": 12},
    "agent": {"name": "tool_agent", "max_turns": 6},
    "algorithm": {"old_log_probs": "recompute"},
    "trainer": {"total_training_steps": 12, "save_freq": 4, "trace_groups": 8},
}


def scenario_of(overhead_s: float = 0.0, **changes: Json) -> Scenario:
    return parse_run(Scenario, {**OWN, "sim": {**KNOWN, "times": {"turn_overhead_s": overhead_s}, **changes}})


def write_run(scenario: Scenario, folder: Path) -> Watcher:
    """The folder that a real run with these edges would have left."""
    outcome = simulate(scenario, seed=0, oracles=False)
    assert outcome.failure is None
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(scenario.train_run()))
    write_metrics(folder, [{"wall_time": step["simulated_s"], **step, "step": int(step["step"])} for step in outcome.watcher.steps])
    for record in outcome.watcher.records:
        TraceLog(folder / "trace.jsonl").append(record)
    return outcome.watcher


def write_metrics(folder: Path, lines: list[dict[str, Json]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def lines_of(folder: Path) -> list[dict[str, Json]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of the known scenario; not to be written to."""
    path = tmp_path_factory.mktemp("runs") / "known"
    write_run(scenario_of(), path)
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> Scenario:
    """What the known run is fitted as."""
    return fit(folder)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    path = tmp_path / "run"
    path.mkdir()
    for name in ("config.toml", "metrics.jsonl", "trace.jsonl"):
        (path / name).write_bytes((folder / name).read_bytes())
    return path


def mean_of(distribution: Distribution) -> float:
    return mean(draw_of(distribution)((place + 0.5) / 1000) for place in range(1000))


# --- round trip -------------------------------------------------------------------------------------------------------------------


def test_a_simulated_run_gives_its_own_speeds_back(found: Scenario) -> None:
    check_speeds(scenario_of().sim, found.sim)


def check_speeds(known: SimConfig, found: SimConfig) -> None:
    for name in ("decode_step_s", "decode_row_s", "prefill_call_s", "prefill_token_s"):
        assert getattr(found.engine, name) == pytest.approx(getattr(known.engine, name), rel=0.01), name
    for name in ("update_call_s", "update_token_s", "forward_token_s", "stage_s", "save_s"):
        assert getattr(found.training, name) == pytest.approx(getattr(known.training, name), rel=0.03), name
    assert found.training.publish_s == pytest.approx(known.training.publish_s, abs=0.005)
    assert mean_of(found.journal.commit_s) == pytest.approx(0.003, rel=0.05)
    assert found.prompts.count == known.prompts.count


def test_a_simulated_run_gives_its_own_lengths_and_latencies_back(found: Scenario) -> None:
    check_draws(scenario_of().sim, found.sim)


def check_draws(known: SimConfig, found: SimConfig) -> None:
    for name in ("turns", "turn_len", "last_len"):
        assert mean_of(getattr(found.sessions, name)) == pytest.approx(mean_of(getattr(known.sessions, name)), rel=0.05), name
    assert mean_of(found.prompts.prompt_len) == pytest.approx(mean_of(known.prompts.prompt_len), rel=0.06)
    assert mean_of(found.reward.latency_s) == pytest.approx(mean_of(known.reward.latency_s), rel=0.05)
    assert found.sessions.turns_alike == pytest.approx(known.sessions.turns_alike, abs=0.12)
    tools = {tool.name: tool for tool in found.tools}
    assert sorted(tools) == ["fast", "search"]
    assert tools["search"].weight / tools["fast"].weight == pytest.approx(3, rel=0.3)
    assert mean_of(tools["search"].latency_s) == pytest.approx(0.3, rel=0.15)
    assert mean_of(tools["fast"].latency_s) == pytest.approx(0.05, rel=0.01)
    assert mean_of(tools["search"].result_len) == pytest.approx(20, abs=0.01)
    assert mean_of(tools["fast"].result_len) == pytest.approx(5, rel=0.1)


def test_the_runs_own_sections_stay(found: Scenario) -> None:
    known = scenario_of()
    for name in ("data", "rollout", "agent", "reward", "store", "replay", "algorithm"):
        assert getattr(found, name) == getattr(known, name), name
    assert found.trainer.total_training_steps == 12
    assert found.trainer.save_freq == 4


def test_what_the_controllers_thread_computes_is_shared_out_to_the_turns(tmp_path: Path) -> None:
    write_run(scenario_of(0.004), tmp_path / "run")
    lines = lines_of(tmp_path / "run")
    write_metrics(tmp_path / "run", [{**line, "loop_lag/cpu_s": 0.004 * 32 * line["num_turns/mean"]} for line in lines])
    assert fit(tmp_path / "run").sim.times.turn_overhead_s == pytest.approx(0.004)


def wall_s(watcher: Watcher) -> float:
    return watcher.steps[-1]["simulated_s"] - watcher.steps[0]["simulated_s"]


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rollout": {"n": 4, "max_num_seqs": 6}},
        {"rollout": {"n": 4, "max_num_seqs": 3}},
        {"data": {"train_batch_size": 16, "max_prompt_length": 64, "max_response_length": 1024}},
    ],
    ids=["the same", "half the slots", "a quarter of the slots", "twice the batch"],
)
def test_the_fitted_scenario_predicts_runs_of_other_shapes(found: Scenario, tmp_path: Path, changes: dict[str, Json]) -> None:
    other = parse_run(Scenario, {**OWN, **changes, "sim": KNOWN})
    asked = found.model_copy(update={name: getattr(other, name) for name in changes})
    outcome = simulate(asked, seed=1, oracles=False)
    assert outcome.failure is None
    assert wall_s(outcome.watcher) == pytest.approx(wall_s(write_run(other, tmp_path / "other")), rel=0.05)


def test_as_many_engines_are_simulated_as_the_run_had(found: Scenario, tmp_path: Path) -> None:
    engines = {**KNOWN["engine"], "count": 2}
    write_run(scenario_of(engine=engines), tmp_path / "two")
    assert (found.sim.engine.count, fit(tmp_path / "two").sim.engine.count) == (1, 2)


def test_a_single_turn_agent_is_one(tmp_path: Path) -> None:
    tree = {
        **{name: value for name, value in OWN.items() if name != "agent"},
        "sim": {
            "prompts": KNOWN["prompts"],
            "sessions": {"turn_len": {"kind": "uniform", "low": 10, "high": 40}},
            "engine": KNOWN["engine"],
        },
    }
    write_run(parse_run(Scenario, tree), tmp_path / "run")
    found = fit(tmp_path / "run")
    assert found.agent.name == "single_turn"
    assert mean_of(found.sim.sessions.turn_len) == pytest.approx(25, rel=0.05)


def test_a_constant_batch_leaves_all_time_to_the_step(tmp_path: Path) -> None:
    tree = {
        **OWN,
        "rollout": {"n": 2, "max_num_seqs": 1},
        "sim": {"sessions": {"turns": 1, "turn_len": 20}, "engine": KNOWN["engine"], "prompts": {"prompt_len": 40}},
    }
    write_run(parse_run(Scenario, tree), tmp_path / "run")
    text, engine = fit_text(tmp_path / "run"), fit(tmp_path / "run").sim.engine
    assert "what a row adds cannot be told" in text
    assert engine.decode_step_s == pytest.approx(0.01 + 0.0005)
    assert engine.decode_row_s == 0.0


# --- the text ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_text_is_the_scenario_and_says_where_each_number_came_from(folder: Path, found: Scenario, tmp_path: Path) -> None:
    text = fit_text(folder)
    (tmp_path / "fitted.toml").write_text(text)
    assert load_run(Scenario, tmp_path / "fitted.toml") == found
    lines = text.splitlines()
    assert str(folder) in lines[0]
    sim = [number for number, line in enumerate(lines) if " = " in line and number > lines.index("[sim.prompts]")]
    uncommented = [lines[number].partition(" = ")[0] for number in sim if not lines[number - 1].startswith("#")]
    assert set(uncommented) <= {"name", "weight", "latency_s", "result_len"}, "a tool has one comment for all of its keys"
    assert "least squares over" in text
    assert re.search(r"Mean of a step: .* s, simulated .* s; the wait for its batch: .* s, simulated .* s", lines[1])
    assert tomllib.loads(text)["sim"]["engine"]["decode_step_s"] == pytest.approx(0.01, rel=0.01)


# --- folders that hold too little -------------------------------------------------------------------------------------------------


def refusal(folder: Path, kind: type[UserError]) -> str:
    with pytest.raises(kind) as caught:
        fit(folder)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_without_trace_is_told_the_key(copy: Path) -> None:
    (copy / "trace.jsonl").unlink()
    assert "set trainer.trace_groups = 1 or more" in refusal(copy, RunFolderError)


def test_a_trace_without_sessions_is_told_the_key(copy: Path) -> None:
    (copy / "trace.jsonl").write_bytes(b"")
    assert "set trainer.trace_groups = 1 or more" in refusal(copy, RunFolderError)


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl"])
def test_a_folder_without_one_of_its_files_is_no_run(copy: Path, name: str) -> None:
    (copy / name).unlink()
    assert f"has no {name}" in refusal(copy, RunFolderError)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_too_few_steps_are_counted(copy: Path, num_steps: int) -> None:
    write_metrics(copy, lines_of(copy)[:num_steps])
    assert f"has {num_steps} steps; a fit needs at least 3" in refusal(copy, RunFolderError)


def test_an_engine_that_does_not_count_cannot_be_fitted(copy: Path) -> None:
    write_metrics(copy, [{name: value for name, value in line.items() if "decode" not in name} for line in lines_of(copy)])
    assert "engine/decode_s" in refusal(copy, RunFolderError)


def test_another_kind_of_run_is_refused(copy: Path) -> None:
    (copy / "config.toml").write_text('[model]\npath = "x"\n[sft]\nbatch_size = 4\n')
    message = refusal(copy, RunFolderError)
    assert "it takes the folder of a training run" in message
    assert "sft" in message


def test_a_line_that_is_no_metrics_is_named(copy: Path) -> None:
    (copy / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n')
    assert "metrics.jsonl:2" in refusal(copy, DataError)


def test_a_last_line_without_its_end_is_passed_over(copy: Path, folder: Path) -> None:
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "timing_s/gen"')
    assert len(read_run(copy).steps) == len(read_run(folder).steps)


# --- steps ------------------------------------------------------------------------------------------------------------------------


def test_the_first_step_of_a_life_is_compared_with_nothing(copy: Path) -> None:
    """Though it is the next one, and the engine has done more until its end than in the life before."""
    lines = lines_of(copy)
    again = [{**line, "incarnation": 1, "engine/decode_s": line["engine/decode_s"] + 1000.0} for line in lines[5:]]
    write_metrics(copy, [*lines[:5], *again])
    assert [step.number for step in read_run(copy).steps] == [2, 3, 4, 5, 7, 8, 9, 10, 11, 12]


def test_an_evaluation_between_two_steps_is_in_neither(copy: Path) -> None:
    lines = lines_of(copy)
    write_metrics(copy, [*lines[:4], {"step": 4, "wall_time": 0.0, "eval/greedy/success": 1.0}, *lines[4:]])
    steps = read_run(copy).steps
    assert [step.number for step in steps if step.wall_s is None] == [5]
    assert len(steps) == len(lines) - 1


def test_a_run_that_was_taken_up_again_counts_from_anew(copy: Path, found: Scenario) -> None:
    lines = lines_of(copy)
    counters = {name: value for name, value in lines[6].items() if name.startswith("engine/")}
    again = [{name: value - counters[name] if name in counters else value for name, value in line.items()} for line in lines[7:]]
    write_metrics(copy, [*lines[:9], *again])
    steps = read_run(copy).steps
    # Steps 8 and 9 were done twice; the first of the second life is compared with nothing.
    assert [step.number for step in steps] == [2, 3, 4, 5, 6, 7, 8, 9, 9, 10, 11, 12]
    assert all(value >= 0 for step in steps for name, value in step.rates.items() if name.startswith(("decode", "prefill")))
    assert fit(copy).sim.engine.decode_row_s == pytest.approx(found.sim.engine.decode_row_s, rel=0.01)
