"""Measured numbers as a distribution of a scenario: a constant where they are alike, else they themselves, thinned.

run_data -> [values] -> measures
"""

from collections.abc import Sequence
from itertools import pairwise

from asyncrl.config.distribution import Distribution, constant

MOST_VALUES = 100
"""Numbers of a distribution: more are replaced by as many means of neighbours, which keeps the mean, and the shape well enough."""
ALIKE = 0.01
"""Numbers that differ by less than this share of their mean, all of them, are one."""
DIGITS = 4
"""That a measured number has."""


def distribution_of(values: Sequence[float]) -> Distribution:
    """Of at least one number, none below 0."""
    ordered = sorted(values)
    mean = sum(ordered) / len(ordered)
    if ordered[-1] - ordered[0] <= ALIKE * mean:
        return constant(rounded(mean))
    return Distribution(kind="empirical", values=tuple(rounded(value) for value in thinned(ordered)))


def thinned(ordered: Sequence[float]) -> list[float]:
    """At most MOST_VALUES numbers in order."""
    count = min(MOST_VALUES, len(ordered))
    borders = [number * len(ordered) // count for number in range(count + 1)]
    return [sum(ordered[begin:end]) / (end - begin) for begin, end in pairwise(borders)]


def rounded(value: float) -> float:
    """To DIGITS digits that say something."""
    return float(f"{value:.{DIGITS}g}")


def quantile(values: Sequence[float], share: float) -> float:
    """Of at least one number; the nearest below."""
    return sorted(values)[int(share * (len(values) - 1))]


def mean_of(values: Sequence[float]) -> float:
    """0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def likeness(groups: Sequence[Sequence[float]]) -> float | None:
    """Correlation of two numbers of one group: 0 where they are independent, 1 where each group has one of its own. None where it
    cannot be told: all numbers are the same, or no group has two."""
    values = [value for group in groups for value in group]
    mean = mean_of(values)
    variance = mean_of([(value - mean) ** 2 for value in values])
    pairs = sum(len(group) * (len(group) - 1) for group in groups)
    if not variance or not pairs:
        return None
    products = 0.0
    for group in groups:
        rests = [value - mean for value in group]
        products += sum(rests) ** 2 - sum(rest * rest for rest in rests)  # of all ordered pairs of different members
    return products / pairs / variance
