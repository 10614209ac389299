"""Ghosts: attempts that do not know that they are over, and write late. Every write must be refused, and change nothing.

life -> [HauntedQueue] -> TransferQueue (whose watches are shaky besides, `tags.py`)
settle, drop, retire, restart -> a ghost, some time later -> put_turn, kv_put, settle_session
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

from asyncrl.errors import DeadlineError, JournalWriteError, StaleLeaseError
from asyncrl.keys import TRAIN, Lease, SessionLease, StepLease, TrajectoryKey
from asyncrl.simulation.errors import Violation
from asyncrl.simulation.faults.kinds import FaultKind
from asyncrl.simulation.faults.plan import FaultPlan
from asyncrl.simulation.faults.tags import ShakyWatch
from asyncrl.transfer_queue import TransferQueue
from asyncrl.transfer_queue.watch import Watch

DELAYS_S = (0.0, 0.01, 1.0, 60.0)
"""Seconds until a ghost writes: at once, or up to so many."""
Write = Callable[[], Coroutine[Any, Any, None]]


class HauntedQueue(TransferQueue):
    """The product's store; `plan` says when a ghost of what has ended there writes."""

    def __init__(self, *args: Any, plan: FaultPlan, **named: Any) -> None:
        super().__init__(*args, **named)
        self._plan = plan
        self._ghosts: set[asyncio.Task[None]] = set()

    # --- what ends

    async def settle_session(self, lease: SessionLease, **rows: Any) -> None:
        await super().settle_session(lease, **rows)
        self._may_haunt(lease)

    async def drop(self, uids: Sequence[str], *, partition_id: str, reason: str) -> None:
        await super().drop(uids, partition_id=partition_id, reason=reason)
        for uid in uids:
            self._may_haunt(SessionLease(uid=uid, session_id=0, incarnation=self.incarnation))

    async def retire(self, keys: Sequence[str], *, partition_id: str, step: int, lease: Lease) -> None:
        await super().retire(keys, partition_id=partition_id, step=step, lease=lease)
        if isinstance(lease, StepLease) and self._plan.strikes(FaultKind.LATE_WRITE, str(lease)):
            self._rise(lease, lambda: TransferQueue.kv_batch_put(self, keys, partition_id=partition_id, lease=lease, fields={}))

    def raise_the_dead(self) -> None:
        """A life begins: sessions of the lives before may not know that theirs are over."""
        for lease in list(self._plan.graves):
            self._may_haunt(lease)

    # --- what is told of it

    def kv_watch(self, partition_id: str) -> Watch:
        return cast("Watch", ShakyWatch(super().kv_watch(partition_id), self._plan))

    # --- who writes after it

    def _may_haunt(self, lease: SessionLease) -> None:
        self._plan.graves.append(lease)
        if self._plan.strikes(FaultKind.LATE_WRITE, str(lease)):
            key = str(TrajectoryKey(uid=lease.uid, session_id=lease.session_id, index=0))
            self._rise(
                lease,
                lambda: TransferQueue.put_turn(self, lease, 0, {"extra_fields": {}}),
                lambda: TransferQueue.kv_put(self, key, partition_id=TRAIN, lease=lease, tag={"status": "late"}),
                lambda: TransferQueue.settle_session(self, lease, partition_id=TRAIN),
            )

    def _rise(self, lease: Lease, *writes: Write) -> None:
        # Not a TaskGroup: a ghost is nobody's task; it goes with its life.
        task = self._plan.loop.create_task(self._haunt(lease, writes), name=f"sim: ghost of {lease}")
        self._ghosts.add(task)
        task.add_done_callback(self._ghosts.discard)

    async def _haunt(self, lease: Lease, writes: Sequence[Write]) -> None:
        rate = self._plan.rates[FaultKind.LATE_WRITE]
        await asyncio.sleep(DELAYS_S[int(rate.draw() * len(DELAYS_S))] * rate.draw())
        for write in writes:
            if self._state.leases.is_open(lease):  # a journal that was begun anew may have it again
                return
            await self._write_late(lease, write)

    async def _write_late(self, lease: Lease, write: Write) -> None:
        before = self._held()
        try:
            await write()
        except StaleLeaseError:
            if self._held() != before:
                self._plan.loop.fail(Violation("I4", f"a write under {lease}, which had ended, was refused and changed something"))
        except (JournalWriteError, DeadlineError):
            return  # nothing can be written any more
        else:
            self._plan.loop.fail(Violation("I4", f"a write under {lease}, which had ended, was accepted"))

    def _held(self) -> tuple[object, ...]:
        """What a write could change."""
        state = self._state
        tags = [(name, len(partition.rows), partition.size_bytes) for name, partition in state.partitions.items()]
        return tags, len(state.leases), state.ledger.num_turns, dict(state.ledger.counters), len(state.ledger.records)

    async def __aexit__(self, *ended: Any) -> None:
        for ghost in list(self._ghosts):
            ghost.cancel()
        await super().__aexit__(*ended)
