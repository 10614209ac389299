"""Straight lines through measured times: seconds = base + slope x size, neither below 0. Plain arithmetic.

run_data -> [lines] -> measures

What cannot be told apart is not guessed: where all sizes are alike, only their sum is known, and the caller says whose it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_SPREAD = 0.02
"""Standard deviation / mean of the sizes below which base and slope cannot be told apart."""
LEAST_SIGNIFICANCE = 2.0
"""Slope / its standard error below which a slope from single measurements is not believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """is_certain: False where base and slope could not be told apart."""

    base_s: float
    slope_s: float
    count: float
    is_certain: bool = True

    def at(self, size: float) -> float:
        return self.base_s + self.slope_s * size


def line_of_sums(count: float, size: float, size_sq: float, seconds: float, size_seconds: float) -> Line:
    """The least squares of a `WorkSums`, none of the two below 0. Where the sizes are alike all is base."""
    if not count:
        return Line(base_s=0.0, slope_s=0.0, count=0.0, is_certain=False)
    spread = size_sq * count - size * size
    if spread <= (LEAST_SPREAD * size) ** 2:
        return Line(base_s=seconds / count, slope_s=0.0, count=count, is_certain=False)
    slope = (size_seconds * count - size * seconds) / spread
    if slope < 0:
        return Line(base_s=seconds / count, slope_s=0.0, count=count)
    base = (seconds - slope * size) / count
    if base < 0:
        return Line(base_s=0.0, slope_s=size_seconds / size_sq, count=count)
    return Line(base_s=base, slope_s=slope, count=count)


def line_of_points(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The same of single measurements. Where base and slope cannot be told apart, by their spread or by their noise, time is
    proportional to size: that is right at the sizes seen, and nearest for a batch of another size."""
    pairs = list(zip(sizes, seconds, strict=True))
    count, total, total_s = len(pairs), sum(sizes), sum(seconds)
    line = line_of_sums(count, total, sum(x * x for x in sizes), total_s, sum(x * y for x, y in pairs))
    if total and not (line.is_certain and _is_significant(pairs, line)):
        return Line(base_s=0.0, slope_s=total_s / total, count=count, is_certain=False)
    return line


def _is_significant(pairs: Sequence[tuple[float, float]], line: Line) -> bool:
    if len(pairs) < 3:
        return False
    mean = sum(size for size, _ in pairs) / len(pairs)
    rest = sum((seconds - line.at(size)) ** 2 for size, seconds in pairs) / (len(pairs) - 2)
    error = math.sqrt(rest / sum((size - mean) ** 2 for size, _ in pairs))
    return line.slope_s > LEAST_SIGNIFICANCE * error
