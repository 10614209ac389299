"""The run's own sections, and the measured ones: a scenario that behaves as the run did.

run_data, measures -> [scenario] -> simulate, text
"""

from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import TrainRun
from asyncrl.config.idle_keys import resolved
from asyncrl.config.loading import parse_run
from asyncrl.config.simulation import Scenario
from asyncrl.ports import Json
from asyncrl.simulation.fit.measures import Fact, facts_of, is_tool_agent
from asyncrl.simulation.fit.own_run import simulated_step_s
from asyncrl.simulation.fit.run_data import RunData, read_run
from asyncrl.simulation.fit.text import as_text
from asyncrl.simulation.fit.values import mean_of

SECTIONS = tuple(name for name in Scenario.model_fields if name != "sim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A scenario, and the facts that it was made of. tree: as its file has it."""

    data: RunData
    tree: dict[str, Json]
    scenario: Scenario
    facts: tuple[Fact, ...]

    @property
    def text(self) -> str:
        """As a TOML file, with a comment at every measured key, and how well it explains its own run."""
        comments = {f"sim.{fact.key}": fact.why for fact in self.facts}
        return as_text(self.tree, comments, _head(self))


def fit(run_folder: Path) -> Scenario:
    """The scenario of the run in `run_folder`. Raises RunFolderError or DataError, in one line, where it cannot."""
    return fitted(run_folder).scenario


def fit_text(run_folder: Path) -> str:
    """The same as a TOML file. Raises as `fit` does."""
    return fitted(run_folder).text


def fitted(run_folder: Path) -> Fitted:
    """The same with what it was made of. Raises as `fit` does."""
    data = read_run(run_folder)
    facts = facts_of(data)
    tree = _tree(data, facts)
    return Fitted(data=data, tree=tree, scenario=_parsed(tree, data), facts=tuple(facts))


def _parsed(tree: dict[str, Json], data: RunData) -> Scenario:
    return parse_run(Scenario, tree, where=f"the scenario of {data.folder}")


def _tree(data: RunData, facts: list[Fact]) -> dict[str, Json]:
    """The sections of the run that a scenario has, without keys that do nothing there; and the facts."""
    own = _own_sections(data.run, data)
    tree = resolved(Scenario.model_validate(own))
    tree["sim"] = {}
    for fact in facts:
        *path, name = fact.key.split(".")
        node = tree["sim"]
        for part in path:
            node = node.setdefault(part, {})
        node[name] = fact.value
    return tree


def _own_sections(run: TrainRun, data: RunData) -> dict[str, Json]:
    """An agent loop of the user's own is simulated as the built-in one that it resembles; every step is simulated."""
    sections = {name: getattr(run, name) for name in SECTIONS}
    agent = "tool_agent" if is_tool_agent(data) else "single_turn"
    sections["agent"] = run.agent.model_copy(update={"name": agent})
    steps = run.trainer.total_training_steps or data.last_step
    sections["trainer"] = run.trainer.model_copy(update={"total_training_steps": steps})
    return sections


def _head(fitted: Fitted) -> str:
    data = fitted.data
    steps = f"steps {data.steps[0].number} to {data.steps[-1].number}"
    failed = f"; {data.num_failed} failed ones are left out" if data.num_failed else ""
    return (
        f"Fitted from {data.folder}: {steps} ({len(data.steps)} used), {len(data.sessions)} traced sessions{failed}.\n"
        f"{_own_run(fitted)}"
        "Keys without a comment are the run's own. Evaluations are not simulated. To predict a run, simulate with --order strict:\n"
        "who came first has a slot first, as in asyncio."
    )


def _own_run(fitted: Fitted) -> str:
    simulated = simulated_step_s(fitted.scenario)
    if simulated is None:
        return ""
    told = []
    for name, what in (("step", "a step"), ("gen", "the wait for its batch")):
        measured = mean_of([step.numbers[f"timing_s/{name}"] for step in fitted.data.steps])
        told.append(f"{what}: {measured:.4g} s, simulated {simulated[name]:.4g} s")
    return f"Mean of {'; '.join(told)}.\n"
