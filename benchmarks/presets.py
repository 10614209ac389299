"""Does each preset in configs/algorithms/ learn? Some steps of each on the quick start's task, from the same warm start.

    python benchmarks/presets.py [--steps N] [--seed N] [--only NAME ...] [--json]

Needs the data and the warm start that `make train` leaves in runs/. Each preset runs in a process of its own, with as many steps as
asked for; its schedule ends there. Success: the share of 256 held-out problems that are solved at temperature 1 (`sampled`) and at
temperature 0 (`greedy`). Exit code 1 when one of them does not raise its sampled success by MIN_GAIN.

JSON: {preset: {before, after, greedy_before, greedy_after, cpu_s}}.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from asyncrl.config import TrainRun, load_run
from asyncrl.observe.metrics import read_metrics
from asyncrl.observe.run_folder import newest_run_folder

CONFIGS = Path(__file__).parent.parent / "configs" / "algorithms"
MIN_GAIN = 0.3
"""Of sampled success. 20 steps give about 0.7; chance gives less than 0.05 on 256 problems."""


def children_cpu_s() -> float:
    """CPU seconds of ended children."""
    return sum(os.times()[2:4])


def measure(config: Path, runs: Path, steps: int, seed: int) -> dict[str, float]:
    """One run of the preset. Raises CalledProcessError, with its output shown, when it fails."""
    begin = children_cpu_s()
    changes = {"total_training_steps": steps, "test_freq": steps, "seed": seed, "default_local_dir": f"'{runs}'"}
    overrides = [f"trainer.{key}={value}" for key, value in changes.items()]
    command = [str(Path(sys.executable).with_name("asyncrl")), "train", str(config), *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()
    name = load_run(TrainRun, config).trainer.experiment_name
    rows = read_metrics(newest_run_folder(runs, name).path / "metrics.jsonl")
    sampled, greedy = (
        [row[f"eval/{mode}/success"] for row in rows if f"eval/{mode}/success" in row] for mode in ("sampled", "greedy")
    )
    return {
        "before": sampled[0],
        "after": sampled[-1],
        "greedy_before": greedy[0],
        "greedy_after": greedy[-1],
        "cpu_s": round(children_cpu_s() - begin, 1),
    }


def main() -> int:
    """Run the presets that were asked for; 1 when one of them has not learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as runs:
        for config in sorted(CONFIGS.glob("*.toml")):
            if not args.only or config.stem in args.only:
                found[config.stem] = measure(config, Path(runs), args.steps, args.seed)
                row = found[config.stem]
                if not args.json:
                    print(
                        f"{config.stem:20} sampled {row['before']:.3f} -> {row['after']:.3f}   "
                        f"greedy {row['greedy_before']:.3f} -> {row['greedy_after']:.3f}   {row['cpu_s']:.0f} CPU s",
                        flush=True,
                    )
    if args.json:
        print(json.dumps(found))
    return int(any(row["after"] - row["before"] < MIN_GAIN for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
