"""The promises by name, and those that must hold of every state. What must hold of a move is asked where the move is made."""

from tests.models.recovery.state import IDLE, NONE, Case, State
from tests.models.search import promise

TOO_OLD = "a token is older than max_staleness versions"
TOO_NEW = "a token is newer than the weights that train on it"
VERSIONS_FALL = "token versions fall within a session"
DEAD_ROW_TRAINED = "a row of a dead attempt is trained on"
ROW_MISSING = "a finished session has no rows"
TRAINED_TWICE = "a prompt is trained on twice in a lineage"
OTHER_KEYS = "a repeated step trains on other keys"
ADMITTED_TWICE = "a prompt is admitted twice"
LOST_TURNS = "a half-done session lost its turns at a restart"
SAME_INCARNATION = "two processes have the same incarnation"
NO_CHECKPOINT = "no checkpoint is left"
NEWER_THAN_JOURNAL = "the newest checkpoint is of a step that the journal does not have"
PURGED = "a record that the newest checkpoint needs is purged"
TWO_WEIGHTS = "one version names two sets of weights"
EVALUATION_LOST = "an evaluation is lost"
EVALUATION_MOVED = "the weights change under an evaluation"
LOST_GROUPS = "admitted = trained + dropped + open does not hold"
RECORD_MISSING = "a record is missing"
TOO_MANY_GROUPS = "more groups are alive than there are places"
GROWS = "records or checkpoints grow without bound"
DEADLOCK = "deadlock"


def audit(x: State, case: Case, *, can_help: bool) -> None:
    """Of what is on disk, whether a process runs or not; and that there is a way on. Raises Broken."""
    j, steps = x.journal, [record.step for record in x.journal.records]
    promise(j.num_open == len(j.groups) + sum(len(record.uids) for record in j.records), LOST_GROUPS)
    promise(steps == list(range(j.purged + 1, j.purged + 1 + len(steps))), RECORD_MISSING)
    promise(len(j.groups) <= case.places, TOO_MANY_GROUPS)
    promise(len(steps) <= 3 * case.interval and len(x.checkpoints) <= 3, GROWS)
    promise(can_help or _is_over(x), DEADLOCK)


def _is_over(x: State) -> bool:
    p = x.process
    if p is None or not x.journal.is_ended or x.journal.groups:
        return False
    return p.phase == IDLE and p.weights == x.journal.last and p.goal == NONE
