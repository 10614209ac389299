"""Is the quick start's gain more than more training? The same warm start, continued by imitation for the same CPU seconds.

    python benchmarks/quickstart_control.py [--seed N] [--runs DIR] [--json]

1. data and warm start, as `make train` does;
2. A: reinforcement learning from it (configs/quickstart.toml), its CPU seconds counted with evaluations and reward worker;
3. B: supervised training from it on the last stage's demonstrations at the same peak learning rate, until the same CPU seconds are
   spent;
4. both models on the same held-out problems at temperature 1.

JSON: rl_success, control_success, difference, warm_start_success, cpu_s, control_steps, seed.
"""

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path

from asyncrl import cli
from asyncrl.assembly import run_evaluation
from asyncrl.config import SFTRun, load_run
from asyncrl.examples.calculator import QuickstartFiles, make
from asyncrl.examples.quickstart import SFT_CONFIG, TRAIN_CONFIG, sft_overrides, train_overrides, warm_start
from asyncrl.observe.run_folder import newest_run_folder
from asyncrl.preflight import check_eval
from asyncrl.sft import WarmStart

CONFIGS = Path(__file__).parent.parent / "configs"
ENDLESS = 1_000_000
"""Steps: the clock ends the control."""


def cpu_s() -> float:
    """User and system seconds of this process and of its ended children."""
    return sum(os.times()[:4])


def reinforce(files: QuickstartFiles, model: Path, *, runs: Path, seed: int) -> tuple[Path, float]:
    """The training run: its model and its CPU seconds."""
    begin = cpu_s()
    cli.train(CONFIGS / TRAIN_CONFIG, train_overrides(files, model, runs=runs, seed=seed))
    return newest_run_folder(runs, "quickstart").export, cpu_s() - begin


def imitate(files: QuickstartFiles, model: Path, budget_s: float, *, runs: Path, seed: int) -> tuple[Path, int]:
    """The control: its model and the steps it got."""
    begin = cpu_s()
    overrides = [
        *sft_overrides(files, runs=runs, seed=seed),
        f"model.path='{model}'",
        f"sft.stages=['{files.style}']",
        "sft.stage_shares=[]",
        f"sft.total_steps={ENDLESS}",
        "sft.optim.lr=5e-4",
        "sft.optim.min_lr_ratio=1.0",  # the file's cosine, without a fall
    ]
    control = WarmStart(load_run(SFTRun, CONFIGS / SFT_CONFIG, overrides))
    steps = 0
    while cpu_s() - begin < budget_s:
        control.step()
        steps += 1
    folder = runs / "quickstart-control"
    control.export(folder)
    return folder, steps


def success(model: Path, files: QuickstartFiles) -> float:
    """Sampled success on the held-out problems."""
    run, rows = check_eval(model, files.val, CONFIGS / TRAIN_CONFIG, ["eval.greedy=false"])
    return asyncio.run(run_evaluation(run, rows))["eval/sampled/success"]


def measure(runs: Path, seed: int) -> dict[str, float]:
    files = make(runs / "quickstart-data", seed=seed)
    start = warm_start(CONFIGS, files, runs=runs, seed=seed) / "hf"
    learned, spent_s = reinforce(files, start, runs=runs, seed=seed)
    control, steps = imitate(files, start, spent_s, runs=runs, seed=seed)
    rl, other = success(learned, files), success(control, files)
    return {
        "rl_success": rl,
        "control_success": other,
        "difference": rl - other,
        "warm_start_success": success(start, files),
        "cpu_s": spent_s,
        "control_steps": steps,
        "seed": seed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=Path, help="folder to keep the runs in; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(arguments.runs or Path(scratch), arguments.seed)
    print("held-out problems, temperature 1")
    print(f"  warm start                              {result['warm_start_success']:.3f}")
    print(f"  + reinforcement learning                {result['rl_success']:.3f}   {result['cpu_s']:.0f} CPU s")
    print(f"  + imitation for the same CPU seconds    {result['control_success']:.3f}   {result['control_steps']} steps")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
