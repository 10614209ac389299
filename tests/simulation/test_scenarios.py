"""Scenarios: every file loads, every rule has a test, and what is written out loads again."""

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import TrainRun, idle_keys, keys_of, load_run, to_toml
from asyncrl.config.distribution import Distribution
from asyncrl.config.simulation import Scenario, SimConfig
from asyncrl.errors import ConfigError

SCENARIOS = sorted((Path(__file__).parents[2] / "configs" / "sim").glob("*.toml"))
BASE = '[trainer]\ntotal_training_steps = 1\n[agent]\nname = "tool_agent"\n'
Tree = dict[str, Any]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(BASE)
    return path


def refusal(path: Path, *overrides: str) -> str:
    """The one line that the user sees, without the file's name."""
    with pytest.raises(ConfigError) as caught:
        load_run(Scenario, path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


# --- files ------------------------------------------------------------------------------------------------------------------------


def test_there_are_the_scenarios_that_are_spoken_of() -> None:
    assert {"reference", "smallest", "tools", "cluster"} <= {path.stem for path in SCENARIOS}


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_what_is_written_out_loads_again_as_the_same(path: Path, tmp_path: Path) -> None:
    scenario = load_run(Scenario, path)
    copy = tmp_path / "copy.toml"
    copy.write_text(to_toml(scenario))
    assert load_run(Scenario, copy) == scenario
    assert Scenario.model_validate_json(scenario.model_dump_json()) == scenario


def test_the_largest_scenario_is_as_large_as_promised() -> None:
    scenario = load_run(Scenario, next(path for path in SCENARIOS if path.stem == "cluster"))
    assert scenario.sim.engine.count == 512
    assert scenario.data.train_batch_size * scenario.rollout.n == 100_000
    assert scenario.rollout.max_num_seqs * scenario.sim.engine.count >= 100_000


def test_every_key_has_help() -> None:
    keys = dict(keys_of(SimConfig, inside_values=True))
    assert [key for key, entry in keys.items() if not entry.description] == []
    assert len(dict(keys_of(SimConfig))) < 80


# --- unknown keys and wrong values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sim.engine.cuont=2", "unknown key sim.engine.cuont; did you mean sim.engine.count?"),
        ("sim.sessions.turns.hihg=2", "unknown key sim.sessions.turns.hihg; did you mean sim.sessions.turns.high?"),
        ('sim.tools=[{name="a", latency=1}]', "unknown key sim.tools.0.latency; did you mean sim.tools.0.latency_s?"),
        ("sim.latency_s=1", "unknown key sim.latency_s; did you mean sim.tools.latency_s?"),
        ("model.path=x", "unknown key model; it belongs to a configuration of `asyncrl train`"),
        ("sft.batch_size=1", "unknown key sft; it belongs to a configuration of `asyncrl sft`"),
        ("sim.engine.count=0", "sim.engine.count = 0: input should be greater than 0"),
        ("sim.reward.latency_s=-1", "sim.reward.latency_s.value = -1: input should be greater than or equal to 0"),
        ("sim.reward.latency_s=true", "sim.reward.latency_s: True is neither a number nor a table with a kind"),
        ("sim.reward.latency_s=nan", "sim.reward.latency_s.value = nan: input should be a finite number"),
        ("sim.reward.latency_s.kind=gauss", "sim.reward.latency_s.kind = 'gauss': input should be 'constant', 'uniform', "),
        ("sim.tools=[]", "sim.tools has 0 tools; 1 to 900 are possible"),
        ('sim.tools=[{name="a"}, {name="a"}]', "sim.tools: ['a', 'a'] names a tool twice"),
        ('sim.tools=[{name="a", weight=0}]', "sim.tools: the weights of ['a'] are all 0, so no tool can be chosen"),
        ("sim.tools=[{}]", "sim.tools.0.name is missing; it has no default"),
        ("trainer.total_training_steps=0", "trainer.total_training_steps is 0: a scenario says how many steps it simulates"),
        ("algorithm.adv_estimator=gae", "algorithm.adv_estimator = 'gae' needs a critic, and a scenario has none;"),
        ("critic.cliprange_value=1", "unknown key critic; it belongs to a configuration of `asyncrl train`"),
        ("actor.ppo_mini_batch_size=5", "data.train_batch_size = 16 is not a multiple of actor.ppo_mini_batch_size = 5"),
    ],
)
def test_a_wrong_key_or_value_is_told_in_one_line(file: Path, override: str, message: str) -> None:
    assert refusal(file, override).startswith(message)


def test_a_scenario_given_to_another_command_is_told(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key sim; it belongs to a configuration of `asyncrl simulate`"):
        load_run(TrainRun, file, ["sim.max_lives=3"])


def test_an_override_reaches_into_a_list_of_tools(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(f'{BASE}[[sim.tools]]\nname = "a"\n[[sim.tools]]\nname = "b"\nlatency_s = {{kind="exponential", mean=1}}\n')
    scenario = load_run(Scenario, path, ["sim.tools.0.latency_s=0.5", "sim.tools.1.latency_s.mean=4"])
    assert [tool.latency_s for tool in scenario.sim.tools] == [Distribution(value=0.5), Distribution(kind="exponential", mean=4)]
    with pytest.raises(ConfigError, match=r"'2' is none of 0\.\.1, the numbers of a list's sections"):
        load_run(Scenario, path, ["sim.tools.2.latency_s=1"])
    with pytest.raises(ConfigError, match="'tools' is a list; say which of its sections"):
        load_run(Scenario, path, ["sim.tools.latency_s=1"])


# --- distributions ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('{ kind = "uniform", low = 3, high = 2 }', "high = 2 is less than low = 3"),
        ('{ kind = "uniform", low = 3 }', 'high is missing: kind "uniform" needs it'),
        ('{ kind = "uniform", mean = 3 }', 'mean has no effect because kind is "uniform", which has low and high'),
        ("{ mean = 3 }", 'mean has no effect because kind is "constant", which has value'),
        ("{}", 'value is missing: kind "constant" needs it'),
        ('{ kind = "exponential" }', 'mean is missing: kind "exponential" needs it'),
        ('{ kind = "lognormal", mean = 1, value = 2 }', 'value has no effect because kind is "lognormal", which has mean and cv'),
        ('{ kind = "empirical" }', 'kind "empirical" needs either values or a file, not both and not neither'),
        ('{ kind = "empirical", values = [1], file = "x" }', 'kind "empirical" needs either values or a file, not both and not'),
        ('{ kind = "empirical", values = [] }', 'kind "empirical" needs either values or a file'),
    ],
)
def test_keys_of_a_distribution_that_do_not_fit_its_kind_are_refused(file: Path, table: str, message: str) -> None:
    assert refusal(file, f"sim.reward.latency_s={table}").startswith(f"sim.reward.latency_s: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "an empirical distribution needs a file with one number a line"),
        ("", "an empirical distribution needs at least one number"),
        ("1\nnan\n", "nan is not a finite number of 0 or more"),
        ("1\n-2\n", "-2.0 is not a finite number of 0 or more"),
        ("1\ntwo\n", "an empirical distribution needs a file with one number a line (could not convert string to float: 'two')"),
    ],
)
def test_an_empirical_file_is_read_when_the_scenario_is(file: Path, text: str | None, message: str) -> None:
    numbers = file.parent / "seconds.txt"
    if text is not None:
        numbers.write_text(text)
    said = refusal(file, 'sim.reward.latency_s={ kind = "empirical", file = "seconds.txt" }')
    assert said.startswith(f"sim.reward.latency_s: {numbers}: {message}")


def test_an_empirical_file_is_looked_for_beside_the_scenario(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file.parent / "seconds.txt").write_text("1\n2\n")
    monkeypatch.chdir("/")
    scenario = load_run(Scenario, file, ['sim.reward.latency_s={ kind = "empirical", file = "seconds.txt" }'])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "copy.toml").write_text(to_toml(scenario))
    assert load_run(Scenario, elsewhere / "copy.toml") == scenario


# --- keys without effect ----------------------------------------------------------------------------------------------------------

# switch -> overrides under which it holds; None: always
HOLDS: dict[str, list[str] | None] = {
    "a scenario has no files": None,
    "a scenario has no critic": None,
    "sim.prompts.val_count is 0": [],
    "time in a scenario is virtual": None,
    'trainer.mode is "sync"': [],
    "agent.max_attempts is 1": ["agent.max_attempts=1"],
    'replay.failed_groups is "abort"': ["replay.failed_groups=abort"],
    "a scenario's engines are sim.engine": None,
    "a scenario has no model": None,
    "rewards of a scenario are sim.reward": None,
    "the tools of a scenario are sim.tools": None,
    "trainer.total_training_steps says how many steps": None,
    "store.journal is false": ["store.journal=false"],
    'agent.name is "single_turn"': ["agent.name=single_turn"],
    "a turn has one tool call at most (agent.parallel_tool_calls)": [],
}
ROWS = [(switch.reason, key) for switch in idle_keys.SCENARIO_SWITCHES for key in switch.keys.split()]
# keys whose default cannot be written as it is: a section, or a list of them
WRITTEN = {
    "data.mapping": 'data.mapping.system="x"',
    "actor.optim": "actor.optim.lr=1e-6",
    "actor.fsdp_config": "actor.fsdp_config.fsdp_size=0",
    "sim.journal": "sim.journal.sync_s=0.1",
    "sim.tools": 'sim.tools=[{name="a"}]',
    "sim.sessions.turns": "sim.sessions.turns=2",
    "sim.sessions.last_len": "sim.sessions.last_len=2",
    "sim.sessions.calls_a_turn": "sim.sessions.calls_a_turn=1",
}
ACTS = ["agent.parallel_tool_calls=true", "trainer.mode=async", "sim.prompts.val_count=2"]


def _written(key: str) -> str:
    return WRITTEN.get(key) or f"{key}={_toml(dict(keys_of(Scenario))[key].default)}"


def _toml(value: object) -> str:
    if isinstance(value, Distribution):
        return "1"
    return str(value).lower() if isinstance(value, bool) else repr(value)


@pytest.mark.parametrize(("reason", "key"), ROWS)
def test_a_key_without_effect_is_refused_even_at_its_default(file: Path, reason: str, key: str) -> None:
    message = refusal(file, *(HOLDS[reason] or []), _written(key))
    assert message.startswith(key)
    assert f"has no effect because {reason}; " in message


@pytest.mark.parametrize(("reason", "key"), [row for row in ROWS if HOLDS[row[0]] is not None])
def test_the_same_key_is_taken_where_it_has_an_effect(file: Path, reason: str, key: str) -> None:
    load_run(Scenario, file, [*ACTS, _written(key)])


def test_every_switch_has_its_test_and_names_keys_that_exist() -> None:
    assert {switch.reason for switch in idle_keys.SCENARIO_SWITCHES} == set(HOLDS)
    known = [*dict(keys_of(Scenario)), *(key for key in WRITTEN)]
    assert [key for _, key in ROWS if key not in known] == []
