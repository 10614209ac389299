"""Tag updates as another machine might deliver them: late, with their keys in another order, or twice.

TransferQueue.kv_watch -> [ShakyWatch] -> replay

A set of changes never overtakes another, and none is lost or torn: that is what a watch promises.
"""

import asyncio
from typing import Self

from asyncrl.fields import Tag
from asyncrl.simulation.draws import unit
from asyncrl.simulation.faults.kinds import FaultKind
from asyncrl.simulation.faults.plan import FaultPlan
from asyncrl.transfer_queue.watch import Watch

LATE_S = (0.0, 0.001, 1.0, 30.0)
"""Seconds that a set is late: not at all, or up to so many."""

Changes = dict[str, Tag | None]


class ShakyWatch:
    """Stands in for `watch`."""

    def __init__(self, watch: Watch, plan: FaultPlan) -> None:
        self._watch = watch
        self._plan = plan
        self._again: Changes | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Changes:
        changes, self._again = self._again, None
        if changes is None:
            changes = await self._watch.__anext__()
        if not self._plan.strikes(FaultKind.TAG_REPLAY, f"{len(changes)} tags"):
            return changes
        draw = self._plan.rates[FaultKind.TAG_REPLAY].draw
        if draw() < 0.5:
            self._again = changes
        await asyncio.sleep(LATE_S[int(draw() * len(LATE_S))] * draw())
        return _shuffled(changes, int(draw() * 2**32))


def _shuffled(changes: Changes, seed: int) -> Changes:
    order = sorted(range(len(changes)), key=lambda number: unit(seed, number))
    items = list(changes.items())
    return dict(items[number] for number in order)
