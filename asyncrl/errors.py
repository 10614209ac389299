"""Every error of asyncrl's own kind, in one tree. A message says what, value, what is allowed, and the next move.

AsyncRLError
├── UserError (ValueError)            the user can mend it: printed as one line `error: ...`, exit code 2
│   ├── ConfigError                   a key, a value, or values that do not fit together
│   ├── DataError                     a dataset file or row
│   ├── ModelError                    a model directory, tokenizer or chat template
│   ├── ToolSpecError                 a tool that does not exist or cannot be described
│   ├── RewardSpecError               a reward function that does not import or cannot be called
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
│   └── TooManyFailuresError          group after group failed and none finished
├── EngineError (RuntimeError)        the rollout engine failed or was closed
│   ├── PromptTooLongError (ValueError)
│   └── EmptySessionError             not one token was sampled
├── RewardError (RuntimeError)        a reward function raised, hung or returned nonsense: a failed session, never reward 0
├── DeadlineError (TimeoutError)      a wait ran into its deadline; the message names who waited for what
├── GroupsExhaustedError (RuntimeError) the feed ended before the batch was full
├── EvaluationError (RuntimeError)    not one session of an evaluation came to an end
└── NonFiniteGradientError (ArithmeticError) too many skipped updates in a row
"""


class AsyncRLError(Exception):
    """Base of every error of this package."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument; our messages are sentences.
        return str(self.args[0]) if self.args else ""


class UserError(AsyncRLError, ValueError):
    """Something the user gave is wrong; the message is one line that says what and what to do."""


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


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or belongs to another run."""


class CheckpointFormatError(CheckpointError):
    """A checkpoint is whole, but another version of asyncrl wrote it: going on from an older one would not be what is meant."""


class JournalError(UserError):
    """A journal cannot be opened or read; the message names the file and the reason."""


class JournalInUseError(JournalError):
    """Another process has the journal open: the run is still going."""


class JournalFormatError(JournalError):
    """Another version of asyncrl wrote the journal, or the file is no journal of ours."""


class JournalDamagedError(JournalError):
    """The journal does not hold what was written to it."""


class StoreError(AsyncRLError):
    """The TransferQueue refused an operation and changed nothing."""


class StaleLeaseError(StoreError):
    """A write came without an open lease: its session was retried, settled or dropped, or its step has ended."""


class LeaseScopeError(StaleLeaseError):
    """The lease is open, but this key or column is not its to write."""


class UnknownKeyError(StoreError, KeyError):
    """A key is not in the partition."""


class UnknownPartitionError(UnknownKeyError):
    """The partition holds no key at all: it was never written, or all of it was cleared or retired."""


class MissingColumnError(StoreError, KeyError):
    """A key lacks a column; the message names the key and the producer that should have written it."""


class DuplicateKeyError(StoreError, ValueError):
    """The same key was given twice in one call."""


class TagCountError(StoreError, ValueError):
    """The number of tags or values differs from the number of keys."""


class DtypeChangeError(StoreError, TypeError):
    """A column already holds another dtype or kind of value."""


class TagValueError(StoreError, TypeError):
    """A tag entry is not a bool, int, float or str under a str name."""


class RecordError(StoreError, ValueError):
    """A step was recorded twice with other keys, retired in part, purged before it was done, or its rows were cleared."""


class JournalWriteError(StoreError, OSError):
    """The journal could not be written (a full disk, say). What was acknowledged is kept; nothing is acknowledged any more."""


class KeyFormatError(AsyncRLError, ValueError):
    """A key does not spell a trajectory."""


class FieldError(AsyncRLError, ValueError):
    """A value breaks the field catalogue or one of the named invariants."""


class TransitionError(AsyncRLError, RuntimeError):
    """A group status can only move pending -> running -> finished | failure."""


class AdmissionError(AsyncRLError, RuntimeError):
    """The admission rule was broken: no place, an unknown group, a step out of order, or counts that do not add up."""


class ReplayError(AsyncRLError, RuntimeError):
    """Replay can no longer follow the TransferQueue: its watch ended or died; the cause is attached."""


class TooManyFailuresError(ReplayError):
    """Too many groups in a row failed with none finished in between; the message carries the last failure."""


class EngineError(AsyncRLError, RuntimeError):
    """The rollout engine failed, or was closed while requests were in flight."""


class PromptTooLongError(EngineError, ValueError):
    """A prompt leaves no room for a single new token in the model's context."""


class EmptySessionError(EngineError):
    """A session without a single sampled token: nothing to score, nothing to train on."""


class RewardError(AsyncRLError, RuntimeError):
    """A reward function raised, ran into its deadline or returned something that is not a finite number."""


class DeadlineError(AsyncRLError, TimeoutError):
    """A wait ran into its deadline; the message names who waited, for what and how long."""


class GroupsExhaustedError(AsyncRLError, RuntimeError):
    """The feed ended before a batch could be filled."""


class NonFiniteGradientError(AsyncRLError, ArithmeticError):
    """Too many updates in a row were skipped because their gradient was not finite."""


class EvaluationError(AsyncRLError, RuntimeError):
    """Every session of an evaluation failed: there is no number to report."""
