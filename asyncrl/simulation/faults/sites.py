"""Sites: named places in the controller where it may be held up. A seed arms some of them, and an armed one holds up now and then.

controller -> World.site -> [SiteFaults] -> a pause
"""

from asyncrl.simulation.draws import unit
from asyncrl.simulation.faults.rates import Rate
from asyncrl.world import derive_seed

ARMED = 0.25
"""Of the sites, by name and seed."""
PAUSES_S = (0.0, 0.001, 0.5, 10.0)
"""Seconds of a pause: a turn of the loop, or up to so many."""


class SiteFaults:
    """`rate`: of the passes through an armed site, those that pause. `seed`: of the run: all its lives arm the same sites."""

    def __init__(self, rate: Rate, seed: int) -> None:
        self._rate = rate
        self._seed = seed
        self._armed: dict[str, bool] = {}

    def pause_s(self, name: str) -> float | None:
        """Seconds to wait at this pass; None: go on."""
        armed = self._armed.get(name)
        if armed is None:
            armed = self._armed[name] = unit(derive_seed(self._seed, "site", name)) < ARMED
        if not armed or not self._rate.hits():
            return None
        return PAUSES_S[int(self._rate.draw() * len(PAUSES_S))] * self._rate.draw()
