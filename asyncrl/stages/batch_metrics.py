"""batch_metrics: the numbers of a trained batch, under verl's names. Padding rows are no trajectories and do not count.

What the reward function said counts once a session, as its last trajectory has it; lengths and turns are of each trajectory.
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from asyncrl.ports import Json, StepContext
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.stages.stage import Stage, StageOutput

READS = frozenset({"reward_score", "num_turns", "extra_fields"})


def batch_metrics_stage() -> Stage:
    """Spread of score, turns and lengths, and the means of what the reward function returned beside its score."""

    def compute(columns: TensorDict, batch: KVBatchMeta, context: StepContext) -> StageOutput:
        real = [row for row, fills in enumerate(batch.padding) if not fills]
        scored = list({session: row for row, session in enumerate(batch.sessions) if session is not None}.values())
        lengths = {
            f"{name}_length": torch.tensor([int(batch.tags[row][tag]) for row in real], dtype=torch.float32)
            for name, tag in (("prompt", "prompt_len"), ("response", "response_len"), ("policy", "policy_len"))
        }
        extra = columns.get("extra_fields").tolist()
        metrics = {
            **_spread("critic/score", columns["reward_score"][scored].float()),
            **_spread("num_turns", columns["num_turns"][real].float()),
            **{key: value for name, numbers in lengths.items() for key, value in _spread(name, numbers).items()},
            **_staleness([int(batch.tags[row].get("min_global_steps", context.version)) for row in real], context.version),
            **_reward_extras([extra[row] for row in scored]),
        }
        return StageOutput(metrics=metrics)

    return Stage(name="batch_metrics", reads=READS, writes=frozenset(), compute=compute)


def _spread(name: str, numbers: torch.Tensor) -> dict[str, float]:
    return {f"{name}/mean": float(numbers.mean()), f"{name}/max": float(numbers.max()), f"{name}/min": float(numbers.min())}


def _staleness(oldest: Sequence[int], version: int) -> dict[str, float]:
    """`training/staleness/*`: weight versions between each trajectory's oldest token and the weights that train on it."""
    behind = torch.tensor([version - tokens for tokens in oldest], dtype=torch.float32)
    return {"training/staleness/mean": float(behind.mean()), "training/staleness/max": float(behind.max())}


def _reward_extras(extra_fields: Sequence[dict[str, Json]]) -> dict[str, float]:
    """`reward/<name>`: mean of each number that the reward function returned beside its score, over the sessions that have it."""
    found: dict[str, list[float]] = {}
    for fields in extra_fields:
        for name, value in fields.get("reward_extra_info", {}).items():
            if isinstance(value, bool | int | float):
                found.setdefault(name, []).append(float(value))
    return {f"reward/{name}": sum(values) / len(values) for name, values in found.items()}
