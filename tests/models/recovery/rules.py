"""The rules of recovery as switches: all on is the specification, one off is a variant that must be caught.

The numbers are those of docs/proofs/recovery.md. Each switch is read in one place of the model, which is the line that the rule is.
"""

from dataclasses import dataclass
from enum import Enum, auto


class Recorded(Enum):
    """When a step's record is written; by rule 5 before any stage runs."""

    FIRST = auto()
    BEFORE_PUBLISHING = auto()
    AFTER_PUBLISHING = auto()


class Opens(Enum):
    """When a restarted run generates again; by rule 11 when the last recorded step is done and its version published."""

    AFTER_LAST_RECORD_IS_PUBLISHED = auto()
    AFTER_LAST_RECORD_IS_TRAINED = auto()
    AT_NEWEST_TOKEN = auto()
    AT_ONCE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    places_freed_by_publication: bool = True
    """1: otherwise a record frees them."""
    admission_is_one_transaction: bool = True
    """1: otherwise the cursor moves first and the prompt follows."""
    cursor_in_journal: bool = True
    """1: otherwise it is in the checkpoint, and a restart sets it back."""
    settling_is_one_transaction: bool = True
    """2: otherwise the status comes first and the rows follow."""
    drop_is_counted_with_its_rows: bool = True
    """2: otherwise a drop leaves the count as it was."""
    drop_survives_fallback: bool = True
    """2: otherwise the alive groups are those of the checkpoint where it has them."""
    retry_deletes_older_rows: bool = True
    """3: otherwise rows of the dead attempt stay."""
    late_writes_are_refused: bool = True
    """3: otherwise a write of a dead attempt or of an earlier process is taken."""
    restart_keeps_attempts: bool = True
    """4: otherwise a half-done session starts again from its prompt."""
    incarnation_is_synced: bool = True
    """4: otherwise a power loss may give two processes the same one."""
    recorded: Recorded = Recorded.FIRST
    """5."""
    record_is_synced: bool = True
    """5: otherwise a power loss may take it."""
    recorded_keys_are_taken_again: bool = True
    """5: otherwise a repeated step samples anew."""
    batch_waits_for_its_groups: bool = True
    """5: otherwise it takes the first terminal groups, wherever they are in the queue."""
    rows_follow_records: bool = True
    """6: otherwise the journal marks retired rows, and the mark says what a restart trains on."""
    checkpoints_end_a_version: bool = True
    """7: otherwise any step may be saved."""
    sigterm_waits_for_version: bool = True
    """7: otherwise the last checkpoint is taken where the process is."""
    done_waits_for_evaluations: bool = True
    """8: otherwise a checkpoint is complete while a result of an older version is owed."""
    done_waits_for_sync: bool = True
    """8: otherwise the weights may be durable while what made them is not."""
    saves_one_at_a_time: bool = True
    """8: otherwise the next checkpoint is begun before prune and purge of this one."""
    purges: bool = True
    """9: otherwise records stay."""
    purges_by_older_checkpoint: bool = True
    """9: otherwise by the newest."""
    damaged_is_deleted: bool = True
    """10: otherwise a damaged checkpoint counts as one of the newest two."""
    opens: Opens = Opens.AFTER_LAST_RECORD_IS_PUBLISHED
    """11."""
    counters_in_journal: bool = True
    """12: otherwise they are in the checkpoint, and a restart sets them back."""
    between_means_no_publication: bool = True
    """13: otherwise weights change under an evaluation that is done between two publications."""
    evaluation_due_at_load: bool = True
    """13: otherwise only at a publication, and the one that was under way at a crash is lost."""
    rest_is_dropped: bool = True
    """14: otherwise groups that cannot fill a batch stay for ever."""


RIGHT = Rules()
