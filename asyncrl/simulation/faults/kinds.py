"""Kinds of faults, by the keys of `[sim.faults]` that hold their rates; and the faults of an exhaustive search."""

from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """What can go wrong. The rate of each is a key of `sim.faults`."""

    AWAIT_ERROR = "await_error"
    AWAIT_CANCEL = "await_cancel"
    AWAIT_HANG = "await_hang"
    TOOL_ERROR = "tool_error"
    TOOL_HANG = "tool_hang"
    REWARD_ERROR = "reward_error"
    REWARD_HANG = "reward_hang"
    STRAGGLER = "straggler"
    ENGINE_DEATH = "engine_death"
    ENGINE_HANG = "engine_hang"
    EVAL_HANG = "eval_hang"
    LATE_WRITE = "late_write"
    TAG_REPLAY = "tag_replay"
    JOURNAL_SLOW = "journal_slow"
    JOURNAL_FAIL = "journal_fail"
    SITE = "site"
    CRASH = "crash"
    SIGTERM = "sigterm"
    CHECKPOINT_DAMAGE = "checkpoint_damage"


ALL = frozenset(FaultKind)
"""Every kind: `--faults all`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFault:
    """A fault at the `number`-th resume (from 1) of the first life, counted over all tasks. In place of what was awaited comes an
    exception (`AWAIT_ERROR`), a cancellation from inside (`AWAIT_CANCEL`), or in a guest nothing, ever, whoever cancels it
    (`AWAIT_HANG`); or the run is asked to stop then (`SIGTERM`)."""

    number: int
    kind: FaultKind
