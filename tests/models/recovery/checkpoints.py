"""Moves of checkpoints: which steps are saved (rule 7), what comes before DONE (rule 8), prune and purge (rule 9)."""

from collections.abc import Iterator

from tests.models.recovery.state import NONE, Case, Checkpoint, Process, State
from tests.models.search import Move


def saves(step: int, case: Case) -> bool:
    """Rule 7: every `every` steps, where a version ends."""
    return step % case.every == 0 and (step % case.updates == 0 or not case.rules.checkpoints_end_a_version)


def is_tidy(x: State, p: Process, case: Case) -> bool:
    """Rule 8: the checkpoint before has its DONE, and prune and purge are over."""
    is_over = len(x.checkpoints) < 3 and x.checkpoints[0].step <= x.journal.purged
    return p.saving is None and (is_over or not case.rules.saves_one_at_a_time or not case.rules.purges)


def begun(x: State, p: Process, case: Case) -> Process:
    """The weights are written in the background from here on. Nothing of the journal is in a checkpoint, but in variants."""
    j, rules = x.journal, case.rules
    saving = Checkpoint(
        p.weights,
        cursor=NONE if rules.cursor_in_journal else j.cursor,
        num_open=NONE if rules.counters_in_journal else j.num_open,
        groups=None if rules.drop_survives_fallback else j.groups,
    )
    return p._replace(saving=saving, is_synced=False)


def checkpoint_moves(x: State, p: Process, case: Case) -> Iterator[Move[str, State]]:
    if p.saving is not None:
        yield from _save(x, p, p.saving, case)
    if len(x.checkpoints) > 2:
        yield Move("prune", True, x._replace(checkpoints=x.checkpoints[-2:]))
    elif case.rules.purges:
        yield from _purge(x, case)


def _save(x: State, p: Process, saving: Checkpoint, case: Case) -> Iterator[Move[str, State]]:
    """Rule 8: first the evaluations of older versions, then the sync, then DONE."""
    is_owed = p.evaluating != NONE and p.evaluating < case.version(saving.step) and case.rules.done_waits_for_evaluations
    if p.is_synced:
        done = p._replace(saving=None, is_synced=False)
        yield Move("DONE", True, x._replace(checkpoints=(*x.checkpoints, saving), process=done))
    elif not is_owed:
        kept = None if case.rules.done_waits_for_sync else x.kept
        yield Move("sync", True, x._replace(kept=kept, process=p._replace(is_synced=True)))


def _purge(x: State, case: Case) -> Iterator[Move[str, State]]:
    """Rule 9: one transaction, up to the older of the two checkpoints that are kept."""
    j = x.journal
    bound = x.checkpoints[0 if case.rules.purges_by_older_checkpoint else -1].step
    if bound > j.purged:
        num_gone = sum(len(record.uids) for record in j.records if record.step <= bound)
        records = tuple(record for record in j.records if record.step > bound)
        yield Move("purge", True, x._replace(journal=j._replace(records=records, purged=bound, num_open=j.num_open - num_gone)))
