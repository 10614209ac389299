"""Several engines as one: routing, watching, bringing back, and new weights to all of them."""

from asyncrl.rollout.pool.limits import PoolLimits, limits_of
from asyncrl.rollout.pool.member import MemberState, Phase
from asyncrl.rollout.pool.pool import EnginePool

__all__ = ["EnginePool", "PoolLimits", "MemberState", "Phase", "limits_of"]
