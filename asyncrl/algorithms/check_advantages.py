"""Stored advantages and constant groups: the checks of `advantages.json` and of two kinds of `corrected.json`.

The stored numbers are verl 0.9.1's, which gives a group of one its raw reward, so the functions run with `singleton="reward"` here.
Legend: B rows, R response tokens.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch

from asyncrl.algorithms.advantages.groups import Singleton, group_signal
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
from asyncrl.algorithms.checking import Case, Check, Compared, compare, compare_exact

Pair = tuple[torch.Tensor, torch.Tensor]
"""advantages_BR and returns_BR."""

_AS_STORED: Singleton = "reward"


def check_advantages(case: Case) -> Iterator[Compared]:
    """Advantages and returns under the mask; both are 0 outside it, and exactly 0 where the stored row is."""
    mask_BR = case.mask()
    for name, got in zip(("advantages", "returns"), advantages_of(case), strict=True):
        yield compare(got, case.outputs[name], mask=mask_BR, name=name)
        yield compare_exact(got, torch.zeros_like(got), mask=~mask_BR, name=f"{name} outside the mask")


def check_corrected(case: Case) -> Iterator[Compared]:
    """As `check_advantages`; and rows that are stored as 0 must be 0 to the last bit: an optimizer would blow up what is left."""
    yield from check_advantages(case)
    advantages_BR, _ = advantages_of(case)
    is_zero_B = (torch.tensor(case.outputs["advantages"]) == 0).all(1)
    yield compare_exact(advantages_BR[is_zero_B], torch.zeros_like(advantages_BR[is_zero_B]), name="rows without signal")


def check_zero_variance(case: Case) -> Iterator[Compared]:
    """Which groups have nothing to learn from."""
    groups = case.inputs["groups"]
    rewards_B = torch.tensor([reward for group in groups for reward in group], dtype=torch.float64)
    sizes_G = torch.tensor([len(group) for group in groups])
    groups_B = torch.repeat_interleave(torch.arange(len(groups)), sizes_G)
    first_G = sizes_G.cumsum(0) - sizes_G
    yield compare_exact((~group_signal(rewards_B, groups_B))[first_G], case.outputs["degenerate"], name="degenerate")


def advantages_of(case: Case) -> Pair:
    """What the case asks for. Raises KeyError for an estimator that there is not."""
    return _ESTIMATORS[case.raw["estimator"]](case)


CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "advantages": check_advantages,
        "corrected/advantage": check_corrected,
        "corrected/zero_variance_filter": check_zero_variance,
    }
)


def _outcome(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return case.floats("token_level_rewards").sum(1, dtype=torch.float64), torch.tensor(case.inputs["index"]), case.mask()


def _twice(advantages_BR: torch.Tensor) -> Pair:
    return advantages_BR.float(), advantages_BR.float()


def _grpo(case: Case) -> Pair:
    norm, epsilon = case.param("norm_adv_by_std_in_grpo", True), case.param("epsilon", 1e-6)
    return _twice(grpo_advantages(*_outcome(case), norm_by_std=norm, epsilon=epsilon, singleton=_AS_STORED))


def _grpo_passk(case: Case) -> Pair:
    norm, epsilon = case.param("norm_adv_by_std_in_grpo", True), case.param("epsilon", 1e-6)
    return _twice(grpo_passk_advantages(*_outcome(case), norm_by_std=norm, epsilon=epsilon))


def _rloo(case: Case) -> Pair:
    return _twice(rloo_advantages(*_outcome(case), singleton=_AS_STORED))


def _rloo_vectorized(case: Case) -> Pair:
    return _twice(rloo_advantages(*_outcome(case), singleton="zero"))


def _opo(case: Case) -> Pair:
    return _twice(opo_advantages(*_outcome(case), singleton=_AS_STORED))


def _gpg(case: Case) -> Pair:
    return _twice(gpg_advantages(*_outcome(case), f_norm=case.param("f_norm", 1.0), singleton=_AS_STORED))


def _reinforce_plus_plus_baseline(case: Case) -> Pair:
    return _twice(reinforce_plus_plus_baseline_advantages(*_outcome(case), singleton=_AS_STORED))


def _gdpo(case: Case) -> Pair:
    rewards_B, groups_B, mask_BR = _outcome(case)
    stored = case.inputs.get("components")
    components = {name: torch.tensor(values) for name, values in stored.items()} if stored else {"reward": rewards_B}
    return _twice(
        gdpo_advantages(
            components,
            groups_B,
            mask_BR,
            weights=case.param("weights", None),
            norm_by_std=case.param("norm_adv_by_std_in_grpo", True),
            epsilon=case.param("epsilon", 1e-6),
            singleton=_AS_STORED,
        )
    )


def _gae(case: Case) -> Pair:
    rewards_BR, values_BR = case.floats("token_level_rewards"), case.floats("values")
    return gae_advantages(rewards_BR, values_BR, case.mask(), gamma=case.param("gamma", 1.0), lam=case.param("lam", 1.0))


def _reinforce_plus_plus(case: Case) -> Pair:
    return reinforce_plus_plus_advantages(case.floats("token_level_rewards"), case.mask(), gamma=case.param("gamma", 1.0))


def _remax(case: Case) -> Pair:
    return remax_advantages(case.floats("token_level_rewards"), case.floats("reward_baselines"), case.mask())


def _token_baseline(function: Callable[..., Pair]) -> Callable[[Case], Pair]:
    def advantages(case: Case) -> Pair:
        return function(
            case.floats("token_level_rewards"),
            torch.tensor(case.inputs["index"]),
            case.mask(),
            case.floats("old_log_probs"),
            case.floats("sum_pi_squared"),
            rollout_is_weights_BR=case.floats("rollout_is_weights") if "rollout_is_weights" in case.inputs else None,
            handle_zero_tail=case.param("handle_zero_tail", True),
            singleton=_AS_STORED,
        )

    return advantages


_ESTIMATORS: Mapping[str, Callable[[Case], Pair]] = {
    "gae": _gae,
    "grpo": _grpo,
    "grpo_vectorized": _grpo,
    "rloo": _rloo,
    "rloo_vectorized": _rloo_vectorized,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "remax": _remax,
    "opo": _opo,
    "grpo_passk": _grpo_passk,
    "gpg": _gpg,
    "gdpo": _gdpo,
    "optimal_token_baseline": _token_baseline(optimal_token_baseline_advantages),
    "tir_optimal_token_baseline": _token_baseline(tir_optimal_token_baseline_advantages),
}
