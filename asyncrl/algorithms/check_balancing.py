"""Balanced partitions against stored numbers: `balancing.json`.

Place: `check.py` calls it. A partition passes when it is one (each row once, equal counts where asked for) and its heaviest part is
no heavier than the stored one; micro-batches when they keep the cap and the groups, and are no more, and no heavier, than stored.
Where the sums are the stored ones, all that is stored of them must hold too, except counts of rows: equal sums may have others.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from asyncrl.algorithms.checking import Case, Check, Compared, compare_exact
from asyncrl.algorithms.partition import contiguous, partition, partition_under_cap, workload


def check_partition(case: Case) -> Iterator[Compared]:
    """The parts, and in tokens the contiguous cut that they improve on."""
    lengths, num_parts, is_equal = case.inputs["lengths"], int(case.params["k"]), bool(case.param("equal_size", False))
    weights = lengths if case.param("measure", "tokens") == "tokens" else [workload(length) for length in lengths]
    parts = partition(weights, num_parts, equal_counts=is_equal)
    yield _true(sorted(row for part in parts for row in part) == list(range(len(lengths))), "each row is in one part")
    yield _true(not is_equal or len({len(part) for part in parts}) == 1, "parts have equal counts")
    sums = _sums(weights, parts)
    yield from _no_heavier(sums, case.outputs["partition_sums_desc"])
    if sums == case.outputs["partition_sums_desc"]:
        yield from _extremes("", sums, {name: case.outputs[name] for name in ("min", "max") if name in case.outputs})
        yield from _extremes("balanced_tokens ", _sums(lengths, parts), case.outputs.get("balanced_tokens", {}))
    before = _sums(lengths, contiguous(len(lengths), num_parts))
    yield from _extremes("contiguous_tokens ", before, case.outputs.get("contiguous_tokens", {}))


def check_micro_batches(case: Case) -> Iterator[Compared]:
    """The fewest parts under a cap of tokens."""
    lengths, cap, group_size = case.inputs["lengths"], int(case.params["max_tokens"]), int(case.param("group_size", 1))
    parts = partition_under_cap(lengths, cap, group_size=group_size)
    groups = sorted(part[start : start + group_size] for part in parts for start in range(0, len(part), group_size))
    yield _true(
        groups == [list(rows) for rows in contiguous(len(lengths), len(lengths) // group_size)], "each group is in one part"
    )
    yield _true(max(_sums(lengths, parts), default=0) <= cap, f"parts have at most {cap} tokens")
    stored = case.outputs["num_micro_batches"]
    yield _true(len(parts) <= stored, f"{len(parts)} micro-batches, expected at most {stored}")
    if len(parts) == stored:
        yield from _no_heavier(_sums([workload(length) for length in lengths], parts), case.outputs["workload_sums_desc"])


def check_workload(case: Case) -> Iterator[Compared]:
    """The formula."""
    yield compare_exact([workload(length) for length in case.inputs["lengths"]], case.outputs["workload"], name="workload")


def _no_heavier(sums: Sequence[int], stored: Sequence[int]) -> Iterator[Compared]:
    """The sums as stored, or others without a heavier part."""
    yield _true(len(sums) == len(stored), f"{len(sums)} parts, expected {len(stored)}")
    heaviest, allowed = max(sums, default=0), max(stored, default=0)
    yield _true(heaviest <= allowed, f"heaviest part: {heaviest}, expected at most {allowed}")
    yield _true(sum(sums) == sum(stored), f"sum of all parts: {sum(sums)}, expected {sum(stored)}")


def _extremes(name: str, sums: Sequence[int], stored: Mapping[str, float]) -> Iterator[Compared]:
    found = {"min": min(sums), "max": max(sums), "minmax_diff": max(sums) - min(sums), "mean": sum(sums) / len(sums)}
    yield from (compare_exact(found[key], value, name=f"{name}{key}") for key, value in stored.items())


def _sums(weights: Sequence[int], parts: Sequence[Sequence[int]]) -> list[int]:
    return sorted((sum(weights[row] for row in part) for part in parts), reverse=True)


def _true(passed: bool, what: str) -> Compared:
    return Compared(passed=passed, worst=0.0 if passed else math.inf, what=what if passed else f"not so: {what}")


CHECKS: Mapping[str, Check] = {
    "balancing/partition": check_partition,
    "balancing/micro_batches": check_micro_batches,
    "balancing/workload": check_workload,
}
