"""Advantages: from token-level rewards to one number a policy token. Place: sample -> [advantages] -> actor update.

`outcome` has the estimators of one number a row, `returns` those that look at each token, `token_baseline` the optimal baseline a
token; `estimators` puts all of them behind one signature, and `registry` names them.
"""

from asyncrl.algorithms.advantages.groups import group_signal
from asyncrl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from asyncrl.algorithms.advantages.outcome import grpo_advantages

__all__ = ["AdvantageInputs", "Advantages", "group_signal", "grpo_advantages"]
