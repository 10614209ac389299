"""Attempts: which failed session is tried again, and when.

Place: session (failure) -> [attempts] -> runner. A retry is a higher attempt of the same session with the same sampling seeds, from
its first turn. Attempts are kept with the session's lease, so that they count through all restarts of the run.
"""

from asyncrl.agents.session import SessionFailure
from asyncrl.config import AgentConfig
from asyncrl.ports import FailureClass

MAX_DOUBLINGS = 32
"""Of the back-off: more seconds than any run has."""


def is_retried(failure: SessionFailure, *, attempt: int, config: AgentConfig) -> bool:
    """What the model or its task did says something about the policy, or would be the same again: only the machinery's failures are
    tried again. attempt: the one that failed, from 0."""
    return failure.kind is FailureClass.INFRA and attempt + 1 < config.max_attempts


def backoff_s(*, attempt: int, config: AgentConfig) -> float:
    """Seconds to wait before attempt `attempt` (from 1): agent.retry_backoff_s, twice as long each time."""
    return config.retry_backoff_s * 2.0 ** min(attempt - 1, MAX_DOUBLINGS)


def describe_retry(failure: SessionFailure, *, attempt: int, config: AgentConfig) -> str:
    """For the user: what failed, and which attempt follows when."""
    after_s = backoff_s(attempt=attempt, config=config)
    return f"{failure}; attempt {attempt} of {config.max_attempts - 1} follows in {after_s:g} s (agent.max_attempts)"
