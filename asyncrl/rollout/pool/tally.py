"""Tally: what the engines of a place in the pool have done, the dead ones included. Counters never fall when one is replaced."""

from collections.abc import Iterable

from asyncrl.ports import RolloutEngine

SHARES = frozenset({"kv_cache_usage"})
"""Of the stats, those between 0 and 1, of which a sum over engines says nothing."""
GAUGES = SHARES | {"running", "waiting", "free_slots", "version"}
"""Of the stats, those that say how things stand; they die with their engine. All others count since its start."""


class Tally:
    """Sums over engines that are no more."""

    def __init__(self) -> None:
        self._beats = 0
        self._counts: dict[str, float] = {}

    def add(self, engine: RolloutEngine) -> None:
        """Its last figures."""
        self._beats += engine.beats
        counts = {name: value for name, value in engine.stats().items() if name not in GAUGES}
        self._counts = total([self._counts, counts])

    def beats(self, engine: RolloutEngine | None) -> int:
        """With those of the one that is there now."""
        return self._beats + (0 if engine is None else engine.beats)

    def stats(self, engine: RolloutEngine | None) -> dict[str, float]:
        """With those of the one that is there now."""
        return total([self._counts] if engine is None else [self._counts, engine.stats()])


def total(stats: Iterable[dict[str, float]]) -> dict[str, float]:
    """Sums by name, in the order in which the names come."""
    sums: dict[str, float] = {}
    for each in stats:
        for name, value in each.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums
