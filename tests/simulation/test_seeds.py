"""A fixed set of seeds, with all faults and all oracles, over scenarios that reach different parts of the controller.

`make ci` runs thousands of them, `make hunt SEEDS=...` as many as the night has time for. A seed that failed once stands in
test_found.py.
"""

import io
import logging
import shlex
import tomllib
from pathlib import Path

import pytest

from asyncrl.config import load_run, parse_run
from asyncrl.config.simulation import Scenario
from asyncrl.simulation.hunt import hunt, print_hunt
from asyncrl.simulation.loop import Order

pytestmark = pytest.mark.long

CONFIGS = Path(__file__).parents[2] / "configs" / "sim"
REFERENCE, SMALLEST = CONFIGS / "reference.toml", CONFIGS / "smallest.toml"
TWO_TOOLS = (
    "agent.parallel_tool_calls=true",
    'sim.sessions.calls_a_turn={ kind = "uniform", low = 1, high = 3 }',
    'sim.tools=[{ name = "a", latency_s = 0.2 }, { name = "b", latency_s = 0.1, is_async = false }]',
)

SCENARIOS: dict[str, tuple[Path, tuple[str, ...], range]] = {
    "reference": (REFERENCE, (), range(1000, 1008)),
    "smallest": (SMALLEST, (), range(2000, 2040)),
    "two tools": (SMALLEST, ("data.max_response_length=64", "sim.sessions.turns=3", *TWO_TOOLS), range(4000, 4030)),
    "no journal": (SMALLEST, ("store.journal=false", "trainer.total_training_steps=3"), range(5000, 5030)),
    "every entry synced": (SMALLEST, ("store.sync=full",), range(6000, 6020)),
    "two engines": (SMALLEST, ("sim.engine.count=2", "data.train_batch_size=2"), range(7000, 7020)),
    "a greedy session a group": (SMALLEST, ("algorithm.adv_estimator=remax",), range(9000, 9030)),
    "groups without signal are replaced": (SMALLEST, ("algorithm.filter_groups=true",), range(9100, 9120)),
    "short deadlines": (
        SMALLEST,
        (
            "agent.timeout_s=3",
            "agent.tool_timeout_s=1",
            "reward.timeout_s=1",
            "rollout.request_timeout_s=2",
            "store.commit_timeout_s=2",
        ),
        range(8000, 8030),
    ),
}
"""Name -> scenario, overrides, seeds."""


def check(scenario: Scenario, seeds: range, replay: str, order: Order = Order.TASKS) -> None:
    """No seed breaks a promise; and faults there were."""
    result, told = hunt(scenario, seeds, order=order, jobs=0, keeps_going=True), io.StringIO()
    print_hunt(result, lambda seed: replay.replace("SEED", str(seed)), file=told)
    assert result.is_ok, told.getvalue()
    assert result.num_runs == len(seeds)
    assert sum(result.hits.values()) > len(seeds)


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_seed_breaks_a_promise(name: str) -> None:
    path, overrides, seeds = SCENARIOS[name]
    replay = f"asyncrl simulate configs/sim/{path.name} --seed SEED --faults all {shlex.join(overrides)}"
    check(load_run(Scenario, path, overrides), seeds, replay)


def test_nor_without_tools() -> None:
    tree = tomllib.loads(SMALLEST.read_text(encoding="utf-8"))
    del tree["sim"]["tools"], tree["sim"]["sessions"]["turns"]
    tree["agent"]["name"] = "single_turn"
    check(parse_run(Scenario, tree), range(3000, 3030), "seed SEED")


@pytest.mark.parametrize("order", [Order.STRICT, Order.ALL])
def test_nor_in_another_order(order: Order) -> None:
    check(load_run(Scenario, SMALLEST), range(100, 120), f"seed SEED --order {order}", order)


def test_a_run_leaves_logging_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    hunt(load_run(Scenario, SMALLEST), range(3), jobs=0)
    logging.getLogger("asyncrl").warning("heard")
    assert caplog.messages == ["heard"]
