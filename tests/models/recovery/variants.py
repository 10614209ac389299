"""Wrong variants: one rule off each, a small case that shows it, and the promise that it breaks first."""

from dataclasses import dataclass, replace
from typing import Any

from tests.models.recovery import oracles
from tests.models.recovery.rules import Opens, Recorded, Rules
from tests.models.recovery.state import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """rule: its number in docs/proofs/recovery.md."""

    rule: int
    case: Case
    breaks: str


def _variant(rule: int, breaks: str, case: Case, **off: Any) -> Variant:
    return Variant(rule=rule, case=replace(case, rules=Rules(**off)), breaks=breaks)


SYNC, NEXT, POWER = Case(), Case(max_staleness=1), Case(power=True)
SELDOM = Case(every=2)
NEXT_SELDOM = Case(max_staleness=1, every=2)
TWO_TURNS, TWO_STEPS = Case(turns=2), Case(updates=2)
NEXT_TWO_TURNS = Case(max_staleness=1, turns=2)

WRONG: dict[str, Variant] = {
    "a place is freed by the record": _variant(1, oracles.TOO_OLD, SYNC, places_freed_by_publication=False),
    "the cursor moves before the prompt is there": _variant(1, oracles.LOST_GROUPS, SYNC, admission_is_one_transaction=False),
    "the cursor is in the checkpoint": _variant(1, oracles.ADMITTED_TWICE, SYNC, cursor_in_journal=False),
    "a session is settled before its rows are there": _variant(2, oracles.ROW_MISSING, SYNC, settling_is_one_transaction=False),
    "a drop is not counted with its rows": _variant(2, oracles.LOST_GROUPS, SYNC, drop_is_counted_with_its_rows=False),
    "a fallback brings dropped groups back": _variant(2, oracles.LOST_GROUPS, NEXT, drop_survives_fallback=False),
    "a retry keeps the rows of the attempt before": _variant(
        3, oracles.DEAD_ROW_TRAINED, TWO_TURNS, retry_deletes_older_rows=False
    ),
    "a late write is taken": _variant(3, oracles.DEAD_ROW_TRAINED, SYNC, late_writes_are_refused=False),
    "a restart begins half-done sessions anew": _variant(4, oracles.LOST_TURNS, TWO_TURNS, restart_keeps_attempts=False),
    "the incarnation is not synced": _variant(4, oracles.SAME_INCARNATION, POWER, incarnation_is_synced=False),
    "the record is never synced": _variant(5, oracles.ADMITTED_TWICE, POWER, record_is_synced=False, done_waits_for_sync=False),
    "the record is synced by the checkpoint only": _variant(
        5, oracles.ADMITTED_TWICE, Case(every=2, power=True), record_is_synced=False
    ),
    "the record is written just before the publication": _variant(
        5, oracles.NEWER_THAN_JOURNAL, SYNC, recorded=Recorded.BEFORE_PUBLISHING
    ),
    "the record is written after the publication": _variant(
        5, oracles.TOO_MANY_GROUPS, NEXT_SELDOM, recorded=Recorded.AFTER_PUBLISHING
    ),
    "a repeated step samples anew": _variant(5, oracles.OTHER_KEYS, NEXT_SELDOM, recorded_keys_are_taken_again=False),
    "a batch takes the first terminal groups": _variant(5, oracles.TOO_OLD, NEXT_TWO_TURNS, batch_waits_for_its_groups=False),
    "a mark in the journal says which rows are retired": _variant(6, oracles.OTHER_KEYS, NEXT_SELDOM, rows_follow_records=False),
    "a checkpoint inside a version": _variant(7, oracles.TWO_WEIGHTS, TWO_STEPS, checkpoints_end_a_version=False),
    "SIGTERM saves inside a version": _variant(
        7, oracles.TWO_WEIGHTS, Case(updates=2, sigterm=True), sigterm_waits_for_version=False
    ),
    "DONE before an older version has its evaluation": _variant(
        8, oracles.EVALUATION_LOST, Case(evaluate=1, between=True), done_waits_for_evaluations=False
    ),
    "DONE before the journal is synced": _variant(
        8, oracles.EVALUATION_LOST, Case(evaluate=1, power=True), done_waits_for_sync=False
    ),
    "the next checkpoint does not wait for prune and purge": _variant(8, oracles.GROWS, SYNC, saves_one_at_a_time=False),
    "nothing is purged": _variant(9, oracles.GROWS, SYNC, purges=False),
    "purge by the newest checkpoint": _variant(9, oracles.PURGED, SYNC, purges_by_older_checkpoint=False),
    "a damaged checkpoint counts as one that is kept": _variant(10, oracles.NO_CHECKPOINT, SYNC, damaged_is_deleted=False),
    "generation begins at once": _variant(11, oracles.TOO_OLD, NEXT, opens=Opens.AT_ONCE),
    "generation begins at the newest token's version": _variant(11, oracles.TOO_OLD, SYNC, opens=Opens.AT_NEWEST_TOKEN),
    "generation begins before the last record's version is published": _variant(
        11, oracles.VERSIONS_FALL, TWO_TURNS, opens=Opens.AFTER_LAST_RECORD_IS_TRAINED
    ),
    "the counters are in the checkpoint": _variant(12, oracles.LOST_GROUPS, SYNC, counters_in_journal=False),
    "weights change under an evaluation": _variant(
        13, oracles.EVALUATION_MOVED, Case(evaluate=2, between=True), between_means_no_publication=False
    ),
    "an evaluation under way at a crash is forgotten": _variant(
        13, oracles.EVALUATION_LOST, Case(evaluate=1), evaluation_due_at_load=False
    ),
    "the rest is kept after the feed's end": _variant(14, oracles.DEADLOCK, Case(batch=2), rest_is_dropped=False),
}
