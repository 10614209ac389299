"""batch_metrics: the numbers of a trained batch, under verl's names. Padding rows are no trajectories and do not count.

What the reward function said counts once a session, as its last trajectory has it; lengths and turns are of each trajectory, and
staleness is of each policy token.
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from asyncrl.ports import Json, StepContext
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.ragged import rows_of
from asyncrl.stages.stage import Stage, StageOutput

READS = frozenset({"reward_score", "num_turns", "extra_fields", "token_versions"})


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
            **_staleness([rows_of(columns["token_versions"])[row] for row in real], context.version),
            **_reward_extras([extra[row] for row in scored]),
        }
        return StageOutput(metrics=metrics)

    return Stage(name="batch_metrics", reads=READS, writes=frozenset(), compute=compute)


def _spread(name: str, numbers: torch.Tensor) -> dict[str, float]:
    return {f"{name}/mean": float(numbers.mean()), f"{name}/max": float(numbers.max()), f"{name}/min": float(numbers.min())}


def _staleness(versions: Sequence[torch.Tensor], version: int) -> dict[str, float]:
    """`staleness/*`: by how many versions the weights that train are ahead of those that sampled a token; `share_<k>`: the share of
    policy tokens that are k behind. Of no policy token: nothing."""
    sampled = torch.cat(list(versions)) if versions else torch.zeros(0, dtype=torch.int64)
    behind = version - sampled[sampled >= 0]  # -1: no policy sampled it
    if not len(behind):
        return {}
    shares = {number: count / len(behind) for number, count in enumerate(behind.bincount().tolist()) if count}
    spread = {"staleness/mean": float(behind.double().mean()), "staleness/max": float(behind.max())}
    return {**spread, **{f"staleness/share_{number}": share for number, share in shares.items()}}


def _reward_extras(extra_fields: Sequence[dict[str, Json]]) -> dict[str, float]:
    """`reward/<name>`: mean of each number that the reward function returned beside its score, over the sessions that have it."""
    found: dict[str, list[float]] = {}
    for fields in extra_fields:
        for name, value in fields.get("reward_extra_info", {}).items():
            if isinstance(value, bool | int | float):
                found.setdefault(name, []).append(float(value))
    return {f"reward/{name}": sum(values) / len(values) for name, values in found.items()}
