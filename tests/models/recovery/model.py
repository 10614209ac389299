"""A run with its faults, as `explore` and `walk` want it.

    admit ─> turn.. ─> record ─> update ─> retire ─> publish      checkpoint: save ─> sync ─> DONE ─> prune ─> purge
    drop, retry, late write, crash, power loss, damage, SIGTERM, the end of the feed: the adversary's, at any moment

Numbers are made small after every move that can make them large.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.models.recovery import oracles
from tests.models.recovery.checkpoints import checkpoint_moves
from tests.models.recovery.feed import feed_moves
from tests.models.recovery.relative import relative
from tests.models.recovery.restart import down_moves, fault_moves, recovery_moves
from tests.models.recovery.sessions import group_moves
from tests.models.recovery.state import RECOVERING, Case, State
from tests.models.recovery.steps import evaluation_moves, step_moves
from tests.models.search import Move

NEW_RUN = State()
"""Its step 0 is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryModel:
    """start: where the search begins."""

    case: Case
    start: State = NEW_RUN

    def moves(self, state: State) -> Iterator[Move[str, State]]:
        process, case = state.process, self.case
        if process is None:
            yield from down_moves(state, case)
            return
        if process.phase == RECOVERING:
            yield from recovery_moves(state, case)
        else:
            yield from feed_moves(state, process, case)
            yield from group_moves(state, process, case)
            yield from step_moves(state, process, case)
            yield from evaluation_moves(state, process, case)
            yield from checkpoint_moves(state, process, case)
        yield from fault_moves(state, process, case)

    def audit(self, state: State, *, can_help: bool) -> None:
        oracles.audit(state, self.case, can_help=can_help)

    def normal(self, state: State) -> State:
        return relative(state, self.case)
