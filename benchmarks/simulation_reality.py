"""Does the simulator tell the truth? A scenario fitted from one real run predicts runs that were not made yet; then they are made.

    python benchmarks/simulation_reality.py [--rounds 3] [--steps 7] [--slots 4] [--runs DIR] [--json]

1. A policy: the quick start's rows and tiny model, taught to call the calculator (200 steps on good demonstrations). It is then
   made deeper by layers that compute and add nothing, so that the engine's time counts beside the tool's.
2. Real runs of `asyncrl train`, interleaved: `base` (4 prompts x 8 sessions, 4 slots, a tool of 0.4 s), `half` its slots, `twice`
   the tool's latency.
3. From each base run alone: `fit`, then the scenario with half the slots, and with every tool latency doubled, simulated.
4. Wall time from the end of the first step to the end of the last but one; error = predicted / measured - 1.

`no change` is the error of who predicts that nothing changes. JSON: medians over the rounds, and every round.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from asyncrl import cli
from asyncrl.config import SFTRun, load_run
from asyncrl.config.distribution import Distribution
from asyncrl.config.simulation import Scenario
from asyncrl.examples.calculator import QuickstartFiles, make
from asyncrl.examples.quickstart import SFT_CONFIG, TRAIN_CONFIG, sft_overrides, train_overrides
from asyncrl.observe.metrics import read_metrics
from asyncrl.observe.run_folder import newest_run_folder
from asyncrl.sft import WarmStart
from asyncrl.simulation.fit import fit
from asyncrl.simulation.loop import Order
from asyncrl.simulation.run import simulate
from asyncrl.tools import tool
from asyncrl.tools.calculator import calculator as plain_calculator

CONFIGS = Path(__file__).parent.parent / "configs"
MODULE = "asyncrl_benchmark_simulation_reality"
WARM_START_STEPS = 200
LAYERS = 16
PROMPTS, SESSIONS, LATENCY_S = 4, 8, 0.4
SEEDS = 8
"""Simulations of a prediction, of which the mean counts: each draws its own sessions."""


@tool(name="calculator")
async def calculator(expression: str) -> str:
    """Calculate one operation (+, -, * or /) on two numbers.

    Args:
        expression: Two numbers with an operation between them, such as "12 + 34".
    """
    await asyncio.sleep(float(os.environ["TOOL_LATENCY_S"]))
    return str(plain_calculator.call({"expression": expression}, {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """latency: times that of the base run."""

    name: str
    slots: int
    latency: float = 1.0


def variants(slots: int) -> tuple[Variant, ...]:
    """The base run first."""
    return (
        Variant(name="base", slots=slots),
        Variant(name="half", slots=slots // 2),
        Variant(name="twice", slots=slots, latency=2.0),
    )


# --- the policy -------------------------------------------------------------------------------------------------------------------


def make_policy(folder: Path) -> tuple[QuickstartFiles, Path]:
    """Rows, and a model that calls its tool."""
    files = make(folder / "data", seed=1)
    stage = [f"sft.stages=['{files.mechanics}']", "sft.stage_shares=[]", f"sft.total_steps={WARM_START_STEPS}"]
    run = load_run(SFTRun, CONFIGS / SFT_CONFIG, [*sft_overrides(files, runs=folder, seed=1), *stage])
    learner = WarmStart(run)
    for _ in range(WARM_START_STEPS):
        learner.step()
    learner.export(folder / "warm")
    deepen(folder / "warm", folder / "model")
    return files, folder / "model"


def deepen(source: Path, target: Path) -> None:
    """The same function in LAYERS layers: the new ones' outputs are multiplied by 0."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    deep = LlamaForCausalLM(type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": LAYERS}))  # type: ignore[no-untyped-call]
    deep.load_state_dict(model.state_dict(), strict=False)
    for layer in deep.model.layers[model.config.num_hidden_layers :]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    deep.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


# --- reality ----------------------------------------------------------------------------------------------------------------------


def train(variant: Variant, files: QuickstartFiles, model: Path, runs: Path, steps: int) -> Path:
    """A real training run; its folder."""
    os.environ["TOOL_LATENCY_S"] = str(LATENCY_S * variant.latency)
    overrides = [
        *train_overrides(files, model, runs=runs, seed=1),
        f"trainer.experiment_name='{variant.name}'",
        f"agent.tools=['{MODULE}:calculator']",
        f"data.train_batch_size={PROMPTS}",
        f"rollout.n={SESSIONS}",
        f"rollout.max_num_seqs={variant.slots}",
        f"trainer.total_training_steps={steps}",
        f"trainer.trace_groups={PROMPTS}",
        "trainer.val_before_train=false",
        f"trainer.test_freq={steps}",
        "eval.max_rows=1",
        "actor.optim.lr=1e-7",  # the policy stays what it is, so that runs differ in nothing else
        "trainer.tensorboard=false",
    ]
    with contextlib.redirect_stdout(sys.stderr):
        cli.train(CONFIGS / TRAIN_CONFIG, overrides)
    return newest_run_folder(runs, variant.name).path


def measured_s(folder: Path) -> float:
    """From the end of the first step to that of the last but one: the last is followed by an evaluation."""
    ends = [float(line["wall_time"]) for line in read_metrics(folder / "metrics.jsonl") if "timing_s/gen" in line]
    return sum(after - before for before, after in pairwise(ends[:-1]))


# --- prediction -------------------------------------------------------------------------------------------------------------------


def changed(scenario: Scenario, variant: Variant, seed: int) -> Scenario:
    """What somebody would ask the simulator about."""
    tools = tuple(entry.model_copy(update={"latency_s": scaled(entry.latency_s, variant.latency)}) for entry in scenario.sim.tools)
    return scenario.model_copy(
        update={
            "rollout": scenario.rollout.model_copy(update={"max_num_seqs": variant.slots}),
            "trainer": scenario.trainer.model_copy(update={"seed": seed}),
            "sim": scenario.sim.model_copy(update={"tools": tools}),
        }
    )


def scaled(latency: Distribution, factor: float) -> Distribution:
    if latency.kind == "constant":
        return latency.model_copy(update={"value": latency.value * factor})
    return latency.model_copy(update={"values": tuple(value * factor for value in latency.values)})


def predicted_s(scenario: Scenario, variant: Variant) -> float:
    """The same stretch as `measured_s`, simulated."""
    return statistics.mean(simulated_s(changed(scenario, variant, seed)) for seed in range(SEEDS))


def simulated_s(scenario: Scenario) -> float:
    outcome = simulate(scenario, seed=0, order=Order.STRICT, oracles=False)  # asyncio's own order: who came first has a slot first
    if outcome.failure is not None:
        raise outcome.failure
    ends = [step["simulated_s"] for step in outcome.watcher.steps]
    return ends[-2] - ends[0]


# --- the two beside each other ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Seconds of one variant in one round; base_s: of the base run that it was predicted from."""

    name: str
    base_s: float
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def no_change(self) -> float:
        return self.base_s / self.measured_s - 1


def one_round(files: QuickstartFiles, model: Path, runs: Path, *, steps: int, slots: int) -> list[Comparison]:
    folders = {variant: train(variant, files, model, runs, steps) for variant in variants(slots)}
    base, *_ = folders.values()
    scenario, base_s = fit(base), measured_s(base)
    return [
        Comparison(
            name=variant.name,
            base_s=base_s,
            predicted_s=predicted_s(scenario, variant),
            measured_s=measured_s(folder),
        )
        for variant, folder in folders.items()
    ]


def summary(rounds: Sequence[Sequence[Comparison]]) -> dict[str, dict[str, float]]:
    """Medians by variant; worst: the error that is farthest from 0."""
    found = {name: [each for every in rounds for each in every if each.name == name] for name in ("base", "half", "twice")}
    return {
        name: {
            "predicted_s": round(statistics.median(each.predicted_s for each in of), 3),
            "measured_s": round(statistics.median(each.measured_s for each in of), 3),
            "error": round(statistics.median(each.error for each in of), 4),
            "worst": round(max(of, key=lambda each: abs(each.error)).error, 4),
            "no_change": round(statistics.median(each.no_change for each in of), 4),
        }
        for name, of in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="each is a base run and both others")
    parser.add_argument("--steps", type=int, default=7, help="training steps of a run; the first and the last do not count")
    parser.add_argument("--slots", type=int, default=4, help="rollout.max_num_seqs of the base run")
    parser.add_argument("--runs", type=Path, help="folder to keep policy and runs in; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    sys.modules[MODULE] = sys.modules[__name__]
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        runs = arguments.runs or Path(scratch)
        files, model = make_policy(runs)
        rounds = [one_round(files, model, runs, steps=arguments.steps, slots=arguments.slots) for _ in range(arguments.rounds)]
    for number, comparisons in enumerate(rounds, start=1):
        for each in comparisons:
            print(
                f"round {number}  {each.name:5}  predicted {each.predicted_s:6.2f} s  measured {each.measured_s:6.2f} s"
                f"  error {each.error:+7.1%}  no change {each.no_change:+7.1%}"
            )
    medians = summary(rounds)
    for name, numbers in medians.items():
        print(f"median   {name:5}  error {numbers['error']:+.1%}  worst {numbers['worst']:+.1%}")
    if arguments.json:
        every = [
            [(each.name, round(each.predicted_s, 3), round(each.measured_s, 3)) for each in each_round] for each_round in rounds
        ]
        print(json.dumps({"bench": "simulation-reality", **medians, "rounds": every}))


if __name__ == "__main__":
    main()
