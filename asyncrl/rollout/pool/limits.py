"""How long the pool waits for an engine, and how often it brings one back."""

from dataclasses import dataclass

from asyncrl.config.rollout import RolloutConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Seconds, except `max_restarts`. Their keys in the configuration are those of [rollout] with the same names; hung_after_s is
    half of request_timeout_s, so that a request is failed by what happened and not by its own patience."""

    start_timeout_s: float
    """An engine's opening."""
    slow_after_s: float
    """Without a step, with requests: from then on it takes no further ones until it makes one."""
    hung_after_s: float
    """Without a step, with requests: it is dead."""
    publish_timeout_s: float
    """Its taking of new weights; also its pausing and going on."""
    max_restarts: int
    """In a row without an answer in between, an engine; then it is given up. 0: never started anew."""
    close_timeout_s: float = 60.0
    """Its closing, the engine's own deadline for it included; then it is left behind."""


def limits_of(rollout: RolloutConfig) -> PoolLimits:
    """As the configuration has them."""
    return PoolLimits(
        start_timeout_s=rollout.start_timeout_s,
        slow_after_s=rollout.slow_after_s,
        hung_after_s=rollout.hung_after_s,
        publish_timeout_s=rollout.publish_timeout_s,
        max_restarts=rollout.max_restarts,
    )
