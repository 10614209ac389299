"""Random histories of a run with its faults."""

from tests.models.recovery.feed import FEED_ENDS
from tests.models.recovery.model import RecoveryModel
from tests.models.recovery.state import Case
from tests.models.search import walk

SELDOM = {
    "crash": 0.02,
    "the newest checkpoint is damaged": 1.0,
    "drop": 0.02,
    "SIGTERM": 0.005,
    FEED_ENDS: 0.0,
    "lose from here": 0.1,
}
"""Faults come seldom, so that there is something to lose; after a crash the newest checkpoint is damaged every other time."""
OTHERWISE = 0.05


def random_history(case: Case, seed: int, *, length: int) -> str:
    """The broken promise, or ""; see `walk`."""
    return walk(
        RecoveryModel(case=case), seed=seed, length=length, odds=lambda action: SELDOM.get(action, OTHERWISE), last=FEED_ENDS
    )
