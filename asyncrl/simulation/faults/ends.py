"""Whether the end of a controller is its right: a fault explains it, or it is a failure of the run.

live (raises) -> [ends] -> the next life, or Outcome.failure

A run may end by a fault, as a real one does; what it promises is to say so by one of a few errors, and that it can be resumed. An
error of another kind is a finding, even when a fault was what led to it: a fault must not break what handles it.
"""

from collections.abc import Iterator, Mapping

from asyncrl.errors import (
    DeadlineError,
    EngineError,
    EvaluationError,
    GroupFailedError,
    GroupsExhaustedError,
    JournalWriteError,
    PoisonedStepError,
    ReplayError,
    StalledError,
    StrayCancelError,
    TooManyFailuresError,
)
from asyncrl.simulation.errors import Crash, InjectedError, SimulationError
from asyncrl.simulation.faults.kinds import FaultKind

K = FaultKind
SLOW = frozenset(
    {K.AWAIT_HANG, K.TOOL_HANG, K.REWARD_HANG, K.ENGINE_DEATH, K.ENGINE_HANG, K.EVAL_HANG, K.STRAGGLER, K.JOURNAL_SLOW, K.SITE}
)
"""Faults that make somebody wait."""
_SESSION = SLOW | {K.AWAIT_ERROR, K.AWAIT_CANCEL, K.TOOL_ERROR, K.REWARD_ERROR}

EXPLAINED_BY: tuple[tuple[type[BaseException], frozenset[FaultKind]], ...] = (
    (JournalWriteError, frozenset({K.JOURNAL_FAIL})),
    (TooManyFailuresError, _SESSION),
    (GroupFailedError, _SESSION),
    (StalledError, _SESSION),
    (EvaluationError, _SESSION),
    (EngineError, frozenset({K.ENGINE_DEATH, K.ENGINE_HANG})),
    (DeadlineError, SLOW),
    (StrayCancelError, frozenset({K.AWAIT_CANCEL})),
)
"""Errors that a controller may end with, and the faults one of which must have happened in its life."""
CARRIERS = (ReplayError,)
"""Errors that tell of another one, their cause."""


def is_explained(error: BaseException, hits: Mapping[FaultKind, int]) -> bool:
    """Did the controller end with `error` for a fault that its life has met? What an oracle found is never explained."""
    if any(isinstance(each, SimulationError) for each in chain_of(error)):
        return False
    return all(_is_explained(each, hits) for each in _members(error))


def ends_run(error: BaseException, hits: Mapping[FaultKind, int], num_lives: int, max_step_tries: int) -> bool:
    """Is this the end of the whole run, and its right? A step that was tried too often (each try takes a life), a failed group, no
    row that is left. hits: of all its lives, since what a fault has done outlives them."""
    if isinstance(error, PoisonedStepError):
        return num_lives > max_step_tries
    return isinstance(error, (GroupFailedError, GroupsExhaustedError)) and any(hits.get(kind) for kind in _SESSION)


def _is_explained(error: BaseException, hits: Mapping[FaultKind, int]) -> bool:
    if isinstance(error, (Crash, InjectedError)):
        return True
    if any(isinstance(error, kind) and any(hits.get(each) for each in faults) for kind, faults in EXPLAINED_BY):
        return True
    return isinstance(error, CARRIERS) and error.__cause__ is not None and _is_explained(error.__cause__, hits)


def _members(error: BaseException) -> Iterator[BaseException]:
    """The error itself, or those of a group."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _members(each)
    else:
        yield error


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error, the members of a group, and what each was raised from or while, each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        members = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        waiting += [one for one in (*members, each.__cause__, each.__context__) if one is not None]
