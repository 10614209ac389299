"""All estimators behind one signature: `estimate(inputs, *, <options>) -> Advantages`.

The keyword-only parameters are the keys of the configuration that have an effect, with their defaults. Nothing is computed here;
what a function does, its source and where it differs stand in `outcome`, `returns` and `token_baseline`. Rows are whole sessions:
`AdvantageInputs.packed` makes them so, `Advantages.unpacked` brings the answer back. Raises ValueError when a column that the
estimator needs is not there.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch

from asyncrl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from asyncrl.algorithms.advantages.outcome import (
    gdpo_advantages,
    gpg_advantages,
    grpo_advantages,
    grpo_passk_advantages,
    opo_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
)
from asyncrl.algorithms.advantages.returns import gae_advantages, reinforce_plus_plus_advantages, remax_advantages
from asyncrl.algorithms.advantages.token_baseline import optimal_token_baseline_advantages, tir_optimal_token_baseline_advantages
from asyncrl.algorithms.blocks import row_sums

Column = TypeVar("Column")


def gae(inputs: AdvantageInputs, *, gamma: float = 1.0, lam: float = 1.0) -> Advantages:
    """Generalised advantage estimation with a critic, whitened."""
    values_BR = _needed(inputs.values_BR, "values")
    return _per_token(*gae_advantages(inputs.rewards_BR, values_BR, inputs.mask_BR, gamma=gamma, lam=lam))


def grpo(inputs: AdvantageInputs, *, norm_adv_by_std_in_grpo: bool = True) -> Advantages:
    """Reward less the group's mean, over its std; without the std, Dr. GRPO."""
    return _per_row(grpo_advantages(*_outcome(inputs), norm_by_std=norm_adv_by_std_in_grpo, dtype=inputs.rewards_BR.dtype))


def rloo(inputs: AdvantageInputs) -> Advantages:
    """Reward less the mean of the group's others."""
    return _per_row(rloo_advantages(*_outcome(inputs), dtype=inputs.rewards_BR.dtype))


def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float = 1.0) -> Advantages:
    """Discounted return, whitened over the batch."""
    return _per_token(*reinforce_plus_plus_advantages(inputs.rewards_BR, inputs.mask_BR, gamma=gamma))


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Advantages:
    """Reward less the group's mean, whitened over the batch."""
    return _per_row(reinforce_plus_plus_baseline_advantages(*_outcome(inputs), dtype=inputs.rewards_BR.dtype))


def remax(inputs: AdvantageInputs) -> Advantages:
    """Return less the reward of the greedy answer."""
    baselines_B = _needed(inputs.reward_baselines_B, "reward_baselines")
    return _per_token(*remax_advantages(inputs.rewards_BR, baselines_B, inputs.mask_BR))


def opo(inputs: AdvantageInputs) -> Advantages:
    """Reward less the group's mean weighted by length."""
    return _per_row(opo_advantages(*_outcome(inputs), dtype=inputs.rewards_BR.dtype))


def grpo_passk(inputs: AdvantageInputs, *, norm_adv_by_std_in_grpo: bool = True) -> Advantages:
    """The lead of a group's best row, and 0 for the others."""
    return _per_row(grpo_passk_advantages(*_outcome(inputs), norm_by_std=norm_adv_by_std_in_grpo, dtype=inputs.rewards_BR.dtype))


def gpg(inputs: AdvantageInputs, *, gpg_f_norm: float = 1.0) -> Advantages:
    """Reward less the group's mean, scaled up by the share of rows with a reward."""
    return _per_row(gpg_advantages(*_outcome(inputs), f_norm=gpg_f_norm, dtype=inputs.rewards_BR.dtype))


def gdpo(
    inputs: AdvantageInputs,
    *,
    norm_adv_by_std_in_grpo: bool = True,
    gdpo_reward_keys: Sequence[str] = (),
    gdpo_reward_weights: Sequence[float] = (),
) -> Advantages:
    """GRPO of each component of the reward, added up and whitened. Without keys all components count, without weights alike."""
    return _per_row(
        gdpo_advantages(
            _needed(inputs.components, "components"),
            inputs.groups_B,
            inputs.mask_BR,
            names=gdpo_reward_keys or None,
            weights=gdpo_reward_weights or None,
            norm_by_std=norm_adv_by_std_in_grpo,
            dtype=inputs.rewards_BR.dtype,
        )
    )


def optimal_token_baseline(inputs: AdvantageInputs, *, otb_handle_zero_tail: bool = True) -> Advantages:
    """Return less the baseline of least variance of each token."""
    return _per_token(
        *optimal_token_baseline_advantages(
            *_tokens(inputs), rollout_is_weights_BR=inputs.rollout_is_weights_BR, handle_zero_tail=otb_handle_zero_tail
        )
    )


def tir_optimal_token_baseline(inputs: AdvantageInputs, *, otb_handle_zero_tail: bool = True) -> Advantages:
    """The same with tokens counted without the gaps that tools leave."""
    return _per_token(
        *tir_optimal_token_baseline_advantages(
            *_tokens(inputs), rollout_is_weights_BR=inputs.rollout_is_weights_BR, handle_zero_tail=otb_handle_zero_tail
        )
    )


def _outcome(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """rewards_B as float64, groups_B, mask_BR."""
    return row_sums(inputs.rewards_BR), inputs.groups_B, inputs.mask_BR


def _tokens(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    old_log_probs_BR = _needed(inputs.old_log_probs_BR, "old_log_probs")
    sum_pi_squared_BR = _needed(inputs.sum_pi_squared_BR, "sum_pi_squared")
    return inputs.rewards_BR, inputs.groups_B, inputs.mask_BR, old_log_probs_BR, sum_pi_squared_BR


def _per_row(advantages_BR: torch.Tensor) -> Advantages:
    return Advantages(advantages_BR=advantages_BR, returns_BR=advantages_BR)


def _per_token(advantages_BR: torch.Tensor, returns_BR: torch.Tensor) -> Advantages:
    return Advantages(advantages_BR=advantages_BR, returns_BR=returns_BR)


def _needed(column: Column | None, name: str) -> Column:
    if column is None:
        raise ValueError(f"the estimator needs {name}, and the batch has none")
    return column
