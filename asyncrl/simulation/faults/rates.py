"""When the next fault of a kind comes: a distance is drawn once a fault, so that a chance that is none costs a subtraction."""

from math import log1p

from asyncrl.simulation.draws import unit

NEVER = 1 << 60
"""A distance that no run walks."""


def distance(share: float, u: float) -> int:
    """Chances up to the next hit, itself included, when `share` of them are hits: geometric, by `u` in [0, 1)."""
    if share <= 0:
        return NEVER
    if share >= 1:
        return 1
    return min(1 + int(log1p(-u) / log1p(-share)), NEVER)


class Rate:
    """Chances of one kind, counted down. `share`: of all chances that are hits; `seed` names the draws."""

    __slots__ = ("_num_draws", "_seed", "left", "share")

    def __init__(self, share: float, seed: int) -> None:
        self.share = share
        self._seed = seed
        self._num_draws = 0
        self.left = distance(share, self.draw())

    def hits(self) -> bool:
        """Is this chance a hit?"""
        self.left -= 1
        if self.left:
            return False
        self.left = distance(self.share, self.draw())
        return True

    def draw(self) -> float:
        """In [0, 1): for whatever else a hit has to decide."""
        self._num_draws += 1
        return unit(self._seed, self._num_draws)
