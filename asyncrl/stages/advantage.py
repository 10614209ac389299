"""advantage: from rewards to one number a token, by the chosen estimator. The work is in `algorithms/`.

Rows of one session are one sequence: their scores count once, and returns run through all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDict

from asyncrl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from asyncrl.algorithms.kl import AdaptiveKL, FixedKL, kl_in_reward
from asyncrl.algorithms.sessions import Packing, session_rewards
from asyncrl.chosen import chosen_estimator
from asyncrl.config import AlgorithmConfig
from asyncrl.errors import FieldError
from asyncrl.ports import Json, StepContext
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.data_proto import DataProto, pad_batch, unpad_field
from asyncrl.protocol.mini_batches import numbered
from asyncrl.protocol.ragged import values_of
from asyncrl.stages.stage import Stage, StageOutput

WRITES = frozenset({"token_level_scores", "token_level_rewards", "advantages", "returns"})
_COLUMNS = {"components": "extra_fields"}
"""The column of an estimator's input, where it has another name."""


@dataclass(slots=True, kw_only=True)
class KLCoefficient:
    """The coefficient of the KL in the reward, as it is after the last batch; a checkpoint keeps it."""

    controller: FixedKL | AdaptiveKL


def kl_coefficient(config: AlgorithmConfig, coef: float | None = None) -> KLCoefficient | None:
    """None when no KL is taken off the reward. coef: the adapted one of a checkpoint; None: the first one."""
    if not config.use_kl_in_reward:
        return None
    control = config.kl_ctrl
    if control.type == "fixed":
        return KLCoefficient(controller=FixedKL(coef=control.kl_coef))
    coef = control.kl_coef if coef is None else coef
    return KLCoefficient(controller=AdaptiveKL(coef=coef, target=control.target_kl, horizon=control.horizon))


def advantage_stage(config: AlgorithmConfig, *, kl: KLCoefficient | None = None, has_is_weights: bool = False) -> Stage:
    """The group is the uid, taken from the keys. kl: takes coefficient x KL(old policy || reference) off the reward of each token,
    and follows it. has_is_weights: there are importance weights for an estimator that can use them.
    Raises ConfigError as `chosen_estimator`."""
    chosen = chosen_estimator(config)
    needs = chosen.estimator.needs
    if has_is_weights and "sum_pi_squared" in needs:
        needs |= {"rollout_is_weights"}
    reads = {"response_mask", "rm_scores", *(_COLUMNS.get(name, name) for name in needs)}
    if kl is not None:
        reads |= {"old_log_probs", "ref_log_prob"}

    def compute(columns: TensorDict, batch: KVBatchMeta, context: StepContext) -> StageOutput:
        padded = pad_batch(columns)
        mask_BR = padded.batch["response_mask"]
        packing = Packing.of(padded.batch["response_lens"], numbered(batch.sessions), num_columns=mask_BR.shape[1])
        rewards_BR, metrics, follow = _rewards(padded, packing, config, kl)
        inputs = AdvantageInputs(
            rewards_BR=rewards_BR,
            mask_BR=mask_BR,
            groups_B=numbered(batch.groups),
            components=_components(padded, batch, config.gdpo_reward_keys) if "components" in needs else None,
            **_optional(padded, needs),
        )
        found = chosen(inputs.packed(packing)).unpacked(packing)
        follow()  # not before: where the estimator raises, a checkpoint has the coefficient of its border
        written = _written(padded, columns["rm_scores"], rewards_BR, found)
        spread = _spread(values_of(written["advantages"]), values_of(columns["response_mask"]))
        return StageOutput(columns=written, metrics=metrics | spread)

    return Stage(name="advantage", reads=frozenset(reads), writes=WRITES, compute=compute)


def _written(padded: DataProto, scores: torch.Tensor, rewards_BR: torch.Tensor, found: Advantages) -> dict[str, torch.Tensor]:
    """The ragged columns; equal ones share their memory."""
    is_score = rewards_BR is padded.batch["rm_scores"]
    advantages = unpad_field(padded, "advantages", found.advantages_BR)
    is_advantage = found.returns_BR is found.advantages_BR
    return {
        "token_level_scores": scores,
        "token_level_rewards": scores if is_score else unpad_field(padded, "token_level_rewards", rewards_BR),
        "advantages": advantages,
        "returns": advantages if is_advantage else unpad_field(padded, "returns", found.returns_BR),
    }


def _rewards(
    padded: DataProto, packing: Packing, config: AlgorithmConfig, kl: KLCoefficient | None
) -> tuple[torch.Tensor, dict[str, float], Callable[[], None]]:
    """Token-level rewards, float32 [B, R], with each session's score once; the numbers of the KL in them; and what moves the
    coefficient."""
    scores_BR = session_rewards(padded.batch["rm_scores"], packing)
    if kl is None:
        return scores_BR, {}, lambda: None
    coef = kl.controller.coef
    old, reference, mask = (packing.pack(padded.batch[name]) for name in ("old_log_probs", "ref_log_prob", "response_mask"))
    rewards, mean_kl = kl_in_reward(packing.pack(scores_BR), old, reference, mask, coef, config.kl_penalty)
    moved = kl.controller.after(mean_kl, int(mask.any(1).sum()))

    def follow() -> None:
        kl.controller = moved

    return packing.unpack(rewards), {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": coef}, follow


def _optional(padded: DataProto, needs: frozenset[str]) -> dict[str, torch.Tensor]:
    """The columns that the estimator asks for, by the names of AdvantageInputs."""
    found = {}
    for name in sorted(needs - {"components"}):
        column = padded.batch[name]
        found[f"{name}_{'BR' if column.ndim > 1 else 'B'}"] = column
    return found


def _components(padded: DataProto, batch: KVBatchMeta, names: list[str]) -> dict[str, torch.Tensor]:
    """Float32 [B] each: the named numbers that the reward function returned. Raises FieldError for a row that lacks one."""
    rows = [fields.get("reward_extra_info", {}) for fields in padded.non_tensor_batch["extra_fields"].tolist()]
    return {
        name: torch.tensor(
            [_number(row, name, key, fills) for row, key, fills in zip(rows, batch.keys, batch.padding, strict=True)]
        )
        for name in names
    }


def _number(row: dict[str, Json], name: str, key: str, fills: bool) -> float:
    value = row.get(name)
    if isinstance(value, bool | int | float):
        return float(value)
    if fills:
        return 0.0
    raise FieldError(
        f"{key}: the reward has no number {name!r} (algorithm.gdpo_reward_keys); it has {sorted(row) or 'none'}: let the reward "
        "function return it beside score"
    )


def _spread(advantages: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    valid = advantages[mask]
    if not len(valid):
        return {"critic/advantages/mean": 0.0, "critic/advantages/max": 0.0, "critic/advantages/min": 0.0}
    return {
        "critic/advantages/mean": float(valid.mean()),
        "critic/advantages/max": float(valid.max()),
        "critic/advantages/min": float(valid.min()),
    }
