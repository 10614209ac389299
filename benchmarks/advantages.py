"""Cost of advantages and off-policy correction, as multiples of reading their inputs once, alternating in one process.

The inputs: 4,096 trajectories x 2,048 tokens (512 groups of 8), float32 rewards and log-probs, a mask with gaps and ends. GRPO with
token importance weights (truncated at 2) is what a run with stale trajectories pays each step; `--all` adds the other estimators,
each against the reading of its own inputs.

Reading is measured twice, by a sum of each tensor (`ratio`) and as fast as torch can (`to fast`): a bool mask is summed up to 20
times slower than it is counted. Each returned tensor has to be mapped into memory, which can cost more than reading all of them.

    python benchmarks/advantages.py [--rows 4096] [--tokens 2048] [--threads 1] [--repeats 7] [--all] [--json]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch

from asyncrl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from asyncrl.algorithms.advantages.registry import ESTIMATORS
from asyncrl.algorithms.correction import Correction, CorrectionOptions, correct

Case = tuple[Callable[[], object], tuple[torch.Tensor, ...]]

GROUP_SIZE = 8
OPTIONS = CorrectionOptions(rollout_is="token", rollout_is_threshold=2.0)
DISCOUNTED = {"gae": {"gamma": 0.99, "lam": 0.95}, "reinforce_plus_plus": {"gamma": 0.99}}
"""Options with which an estimator costs most."""


def make_inputs(rows: int, tokens: int) -> tuple[AdvantageInputs, torch.Tensor]:
    """(everything that any estimator reads, the rollout's log-probs); the same numbers at every call."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    lengths_B = torch.randint(tokens // 4, tokens + 1, (rows,), generator=generator)
    inside_BR = torch.arange(tokens) < lengths_B[:, None]
    mask_BR = inside_BR & (torch.arange(tokens) % 100 < 90)  # ten tokens of a tool's answer in a hundred
    rewards_BR = torch.zeros(rows, tokens)
    rewards_BR[torch.arange(rows), lengths_B - 1] = (random(rows) > 0.5).float()
    old_log_probs_BR = -3 * random(rows, tokens)
    inputs = AdvantageInputs(
        rewards_BR=rewards_BR,
        mask_BR=mask_BR,
        groups_B=torch.arange(rows) // GROUP_SIZE,
        values_BR=random(rows, tokens),
        reward_baselines_B=random(rows),
        components={"truth": rewards_BR.sum(1), "form": random(rows)},
        old_log_probs_BR=old_log_probs_BR,
        sum_pi_squared_BR=random(rows, tokens),
    )
    return inputs, old_log_probs_BR + 0.1 * torch.randn(rows, tokens, generator=generator)


def read(tensors: Iterable[torch.Tensor]) -> None:
    """A sum of each tensor."""
    for tensor in tensors:
        tensor.sum()


def read_fast(tensors: Iterable[torch.Tensor]) -> None:
    """One pass over each tensor, as fast as torch can."""
    for tensor in tensors:
        tensor.count_nonzero() if tensor.dtype == torch.bool else tensor.sum()


def cpu_ms(run: Callable[[], object]) -> float:
    """Processor time of one call, of all threads."""
    start = time.process_time()
    run()
    return 1000 * (time.process_time() - start)


def cases(inputs: AdvantageInputs, rollout_BR: torch.Tensor, *, every: bool) -> dict[str, Case]:
    """(what is measured, its inputs) by name."""
    old_BR, mask_BR = inputs.old_log_probs_BR, inputs.mask_BR
    assert old_BR is not None

    def corrected(*, with_metrics: bool) -> Correction:
        return correct(old_BR, rollout_BR, mask_BR, OPTIONS, with_metrics=with_metrics)

    def both() -> tuple[Advantages, Correction]:
        return ESTIMATORS["grpo"](inputs), corrected(with_metrics=True)

    log_probs = (old_BR, rollout_BR, mask_BR)
    found: dict[str, Case] = {
        "grpo_and_correction": (both, (inputs.rewards_BR, *log_probs)),
        "correction": (lambda: corrected(with_metrics=True), log_probs),
        "correction_without_metrics": (lambda: corrected(with_metrics=False), log_probs),
    }
    for name in ESTIMATORS if every else ("grpo",):
        found[name] = _of_estimator(name, inputs)
    return found


def _of_estimator(name: str, inputs: AdvantageInputs) -> Case:
    estimator, options = ESTIMATORS[name], DISCOUNTED.get(name, {})
    columns = [getattr(inputs, f"{need}_BR", None) for need in estimator.needs]
    large = (column for column in columns if column is not None)
    return lambda: estimator(inputs, **options), (inputs.rewards_BR, inputs.mask_BR, *large)


def measure(rows: int, tokens: int, *, threads: int = 1, repeats: int = 7, every: bool = False) -> dict[str, dict[str, float]]:
    """Medians over `repeats` rounds of milliseconds, and of the ratio within each round; one round before them is not counted."""
    torch.set_num_threads(threads)
    inputs, rollout_BR = make_inputs(rows, tokens)
    measured = cases(inputs, rollout_BR, every=every)
    rounds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in measured}
    for _ in range(repeats + 1):
        for name, (run, tensors) in measured.items():
            rounds[name].append((cpu_ms(run), cpu_ms(partial(read, tensors)), cpu_ms(partial(read_fast, tensors))))
    return {name: _medians(times[1:]) for name, times in rounds.items()}


def _medians(times: list[tuple[float, float, float]]) -> dict[str, float]:
    ms, read_ms, fast_ms = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(run / reading for run, reading, _ in times)
    to_fast = statistics.median(run / reading for run, _, reading in times)
    return {
        "ms": round(ms, 1),
        "read_ms": round(read_ms, 1),
        "fast_read_ms": round(fast_ms, 1),
        "ratio": round(ratio, 2),
        "ratio_to_fast": round(to_fast, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--all", action="store_true", help="every estimator")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    result = measure(args.rows, args.tokens, threads=args.threads, repeats=args.repeats, every=args.all)
    print(f"{'':30s} {'ms':>9s} {'read ms':>9s} {'fast ms':>9s} {'ratio':>8s} {'to fast':>8s}")
    for name, row in result.items():
        times = " ".join(f"{row[key]:9.1f}" for key in ("ms", "read_ms", "fast_read_ms"))
        print(f"{name:30s} {times} {row['ratio']:8.2f} {row['ratio_to_fast']:8.2f}")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
