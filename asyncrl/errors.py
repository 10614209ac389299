"""Every error of asyncrl's own kind, in one tree. A message says what, value, what is allowed, and the next move.

AsyncRLError
├── UserError (ValueError)            the user can mend it: printed as one line `error: ...`, exit code 2
│   ├── ConfigError                   a key, a value, or values that do not fit together
│   ├── DataError                     a dataset file or row
│   ├── ModelError                    a model directory, tokenizer or chat template
│   ├── ToolSpecError                 a tool that does not exist or cannot be described
│   ├── RewardSpecError               a reward function that does not import or cannot be called
│   ├── RunFolderError                a folder that is no run's, or lacks the file asked for
│   ├── CheckpointError               a checkpoint that is missing, damaged or of another run
│   │   └── CheckpointFormatError     a checkpoint that another version of asyncrl wrote
│   └── JournalError                  a journal that cannot be opened or read
│       ├── JournalInUseError         another process has it open
│       ├── JournalFormatError        a journal that another version of asyncrl wrote
│       └── JournalDamagedError       what it holds is not what was written
├── StoreError                        the TransferQueue refused; nothing was changed
│   ├── StaleLeaseError               a write without an open lease
│   │   └── LeaseScopeError           an open lease that does not cover this key or column
│   ├── UnknownKeyError (KeyError)    a key that is not in the partition
│   │   └── UnknownPartitionError     a partition that holds no key at all
│   ├── MissingColumnError (KeyError) a field that a key does not have
│   ├── DuplicateKeyError (ValueError)
│   ├── TagCountError (ValueError)    number of tags or values differs from the number of keys
│   ├── DtypeChangeError (TypeError)  a column already has another dtype
│   ├── TagValueError (TypeError)     a tag entry that is not a bool, int, float or str
│   ├── RecordError (ValueError)      a step's record, or the rows of one, used against the order of the steps
│   └── JournalWriteError (OSError)   the journal could not be written: nothing is acknowledged any more
├── KeyFormatError (ValueError)       a key that does not spell a trajectory
├── FieldError (ValueError)           a tensor breaks the catalogue or an invariant of protocol/
├── TransitionError (RuntimeError)    a group status moved backwards
├── AdmissionError (RuntimeError)     the admission rule or the conservation of groups was broken
├── ReplayError (RuntimeError)        replay can no longer follow the TransferQueue
│   ├── TooManyFailuresError          group after group failed and none finished
│   └── GroupFailedError              a group failed, and the run was told to end then
├── EngineError (RuntimeError)        the rollout engine failed or was closed
│   ├── PromptTooLongError (ValueError)
│   ├── EmptySessionError             not one token was sampled
│   ├── BrokenWeightsError            a publication failed half way: the engine is good for nothing any more
│   └── EngineLostError               no engine is left, and none will come back
├── AlgorithmError (RuntimeError)     an estimator or a loss of the user raised, or answered what cannot be trained on
├── RewardError (RuntimeError)        a reward function raised, hung or returned nonsense: a failed session, never reward 0
├── TaskEndedError (RuntimeError)     an environment ended the task by itself: neither tried again nor a reward
├── DeadlineError (TimeoutError)      a wait ran into its deadline; the message names who waited for what
│   └── StalledError                  nothing goes on, and nothing that is waited for can come
├── RankError (RuntimeError)          the rank processes cannot go on
│   ├── RankDiedError                 a rank process is gone, or its group was ended before
│   └── RankHungError (DeadlineError) no rank gave a sign of life for too long
├── PoisonedStepError (RuntimeError)  a step was begun too often and never came to its end
├── StrayCancelError (RuntimeError)   a part of the controller was cancelled, and nobody had asked for it
├── GroupsExhaustedError (RuntimeError) the feed ended before the batch was full
├── EvaluationError (RuntimeError)    not one session of an evaluation came to an end
└── NonFiniteGradientError (ArithmeticError) too many skipped updates in a row

`To do:` in a class's docstring is its last column in docs/data-protocol.md, for the errors of that protocol.
"""

from typing import ClassVar


class AsyncRLError(Exception):
    """Base of every error of this package."""

    exit_code: ClassVar[int] = 3
    """Of a command that ends with it."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument; our messages are sentences.
        return str(self.args[0]) if self.args else ""


class UserError(AsyncRLError, ValueError):
    """Something the user gave is wrong; the message is one line that says what and what to do."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration key or value is wrong, or two of them do not fit together."""


class DataError(UserError):
    """A dataset file or row cannot be used; the message names file and row."""


class ModelError(UserError):
    """A model directory, its tokenizer or its chat template cannot be used."""


class ToolSpecError(UserError):
    """A tool does not exist, or its function cannot be described by a schema."""


class RewardSpecError(UserError):
    """A reward function cannot be imported or called."""


class RunFolderError(UserError):
    """A folder is that of no run, or has not the file that a command shows; the message names the runs that have it."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or belongs to another run."""


class CheckpointFormatError(CheckpointError):
    """A checkpoint is whole, but another version of asyncrl wrote it: going on from an older one would not be what is meant."""


class JournalError(UserError):
    """A journal cannot be opened or read; the message names the file and the reason.

    To do: mend what the message names (the folder, its rights, the disk), and start again.
    """


class JournalInUseError(JournalError):
    """Another process has the journal open: the run is still going.

    To do: wait for that run, or end it; two processes never write one journal.
    """


class JournalFormatError(JournalError):
    """Another version of asyncrl wrote the journal, or the file is no journal of ours.

    To do: start a new run, or go on with the version of asyncrl that wrote it.
    """


class JournalDamagedError(JournalError):
    """The journal does not hold what was written to it.

    To do: put a copy of the file in its place, or start a new run; nothing of it is used.
    """


class StoreError(AsyncRLError):
    """The TransferQueue refused an operation and changed nothing.

    To do: read the message, which names verb and key; whoever called has to ask for something else.
    """


class StaleLeaseError(StoreError):
    """A write came without an open lease: its session was retried, settled or dropped, or its step has ended.

    To do: nothing where a late writer was shut out, which is what leases are for; else open the lease first.
    """


class LeaseScopeError(StaleLeaseError):
    """The lease is open, but this key or column is not its to write.

    To do: write it under the lease of its own group, session or step.
    """


class UnknownKeyError(StoreError, KeyError):
    """A key is not in the partition.

    To do: ask only for keys that `kv_list` or a watch shows now.
    """


class UnknownPartitionError(UnknownKeyError):
    """The partition holds no key at all: it was never written, or all of it was cleared or retired.

    To do: check the name of the partition (`train` for what is trained on), or put something first.
    """


class MissingColumnError(StoreError, KeyError):
    """A key lacks a column; the message names the key and the producer that should have written it.

    To do: let the named producer run first, or do not read the column.
    """


class DuplicateKeyError(StoreError, ValueError):
    """The same key was given twice in one call.

    To do: give every key once.
    """


class TagCountError(StoreError, ValueError):
    """The number of tags or values differs from the number of keys.

    To do: give exactly one value, and one tag, a key.
    """


class DtypeChangeError(StoreError, TypeError):
    """A column already holds another dtype or kind of value.

    To do: write the dtype that the column has (that of the catalogue), all rows of a put alike.
    """


class TagValueError(StoreError, TypeError):
    """A tag entry is not a bool, int, float or str under a str name.

    To do: put it into a field; a tag holds plain scalars.
    """


class RecordError(StoreError, ValueError):
    """A step's record used against the order of the steps: with other keys, with a group that is not whole or has not settled,
    retired in part, purged before it was retired, or one of its rows cleared. Or a session's turn that does not follow the one
    before.

    To do: this is a mistake of the caller: take the steps in order, each with the keys that it was recorded with.
    """


class JournalWriteError(StoreError, OSError):
    """The journal could not be written (a full disk, say). What was acknowledged is kept; nothing is acknowledged any more.

    To do: mend the cause in the message (make room, say), and resume the run.
    """


class KeyFormatError(AsyncRLError, ValueError):
    """A key does not spell a trajectory.

    To do: spell keys with `TrajectoryKey`.
    """


class FieldError(AsyncRLError, ValueError):
    """A value breaks the field catalogue or one of the named invariants.

    To do: read key, field and numbers in the message; the stage or room that wrote the field has to change.
    """


class TransitionError(AsyncRLError, RuntimeError):
    """A group status can only move pending -> running -> finished | failure.

    To do: this is a mistake of whoever wrote the tag `status`; nobody may write to a terminal group.
    """


class AdmissionError(AsyncRLError, RuntimeError):
    """The admission rule was broken: no place, an unknown group, a step out of order, or counts that do not add up.

    To do: this is a mistake of the caller; the message has the count or the step that is wrong.
    """


class ReplayError(AsyncRLError, RuntimeError):
    """Replay can no longer follow the TransferQueue: its watch ended or died; the cause is attached.

    To do: mend the cause that is attached; the run can be resumed from its last checkpoint.
    """


class TooManyFailuresError(ReplayError):
    """Too many groups in a row failed with none finished in between; the message carries the last failure.

    To do: mend what the last failure names (tool, reward, engine), or allow more by `replay.max_failed_groups_in_a_row`.
    """


class GroupFailedError(ReplayError):
    """A group failed, and `replay.failed_groups` is "abort"; the message carries the group's failure.

    To do: mend what the failure names, and resume; or let failed groups be replaced: `replay.failed_groups = "refill"`.
    """


class EngineError(AsyncRLError, RuntimeError):
    """The rollout engine failed, or was closed while requests were in flight."""


class PromptTooLongError(EngineError, ValueError):
    """A prompt leaves no room for a single new token in the model's context."""


class EmptySessionError(EngineError):
    """A session without a single sampled token: nothing to score, nothing to train on."""


class BrokenWeightsError(EngineError):
    """A publication failed after it had begun: the engine has some weights of the new version, and maybe caches of the old one.
    It must answer no request any more."""


class EngineLostError(EngineError):
    """The engine of a run has died, or all of them are given up: nothing can be sampled any more.

    To do: mend what the message names, and go on with --resume.
    """


class AlgorithmError(AsyncRLError, RuntimeError):
    """An estimator or a loss of the user raised in a step, or answered what cannot be trained on; the message names it."""

    has_learned: bool = False
    """Had this update made an optimizer step before? If not, the weights are those of the step before."""


class RewardError(AsyncRLError, RuntimeError):
    """A reward function raised, ran into its deadline or returned something that is not a finite number."""


class DeadlineError(AsyncRLError, TimeoutError):
    """A wait ran into its deadline; the message names who waited, for what and how long.

    To do: see what the named party was doing; where it only needs longer, raise the key that the message names.
    """


class StalledError(DeadlineError):
    """No progress is possible or in sight; the message is a report of what the run waits for.

    To do: mend what the report names as standing, and resume the run.
    """


class RankError(AsyncRLError, RuntimeError):
    """The rank processes cannot go on; the message says which rank, and at what.

    To do: mend what the message names (memory, say), and go on with --resume.
    """


class RankDiedError(RankError):
    """A rank process is gone, or the group was ended before; the message has the signal or exit code, and the rank's last beat.

    To do: see what ended it (its output, the memory of the machine), and go on with --resume.
    """


class RankHungError(RankError, DeadlineError):
    """No rank gave a sign of life within the deadline; the message says of each what it did last, and which is behind.

    To do: see what the rank that is behind was doing; where it only needs longer, raise the key that the message names.
    """


class TaskEndedError(AsyncRLError, RuntimeError):
    """An environment ended the task by itself: a tool or agent loop raises it where there is nothing to score.

    Its session fails; it is neither tried again nor given a reward.
    """


class PoisonedStepError(AsyncRLError, RuntimeError):
    """A step was begun `trainer.max_step_tries` times and never came to its end; the message names its keys.

    To do: see what ends the process in this step (the log, the memory); then raise the key, and resume the run.
    """


class StrayCancelError(AsyncRLError, RuntimeError):
    """A part of the controller was cancelled by nobody who may: something that it waited for was cancelled, or raised it.

    To do: resume the run; the traceback says where the cancellation came from.
    """


class GroupsExhaustedError(AsyncRLError, RuntimeError):
    """The feed ended before a batch could be filled.

    To do: give the feed more rows or epochs, or a smaller `data.train_batch_size`.
    """


class NonFiniteGradientError(AsyncRLError, ArithmeticError):
    """Too many updates in a row were skipped because their gradient was not finite."""


class EvaluationError(AsyncRLError, RuntimeError):
    """Every session of an evaluation failed: there is no number to report."""
