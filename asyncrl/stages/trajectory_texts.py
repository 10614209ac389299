"""From columns of a batch to trajectories that a person can read."""

from collections.abc import Sequence

from tensordict import TensorDict

from asyncrl.observe.trajectories import TrajectoryText, to_turns
from asyncrl.ports import Decode
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.ragged import rows_of

TEXT_FIELDS = ("prompts", "responses", "response_mask", "reward_score", "num_turns", "extra_fields")


def first_trajectories(batch: KVBatchMeta, count: int) -> KVBatchMeta:
    """The rows to show of a batch: its first `count` trajectories, never padding."""
    trajectories = batch.without_padding()
    return trajectories.select(range(min(count, len(trajectories))))


def trajectory_texts(keys: Sequence[str], columns: TensorDict, decode: Decode) -> list[TrajectoryText]:
    """One text a key, decoded from the ids that are trained on. columns: TEXT_FIELDS."""
    prompts, responses, masks = (rows_of(columns[name]) for name in ("prompts", "responses", "response_mask"))
    extra = columns.get("extra_fields").tolist()
    return [
        TrajectoryText(
            key=key,
            reward=float(columns["reward_score"][row]),
            prompt=decode(prompts[row].tolist()),
            turns=to_turns(responses[row].tolist(), masks[row].tolist(), decode),
            facts={
                "num_turns": int(columns["num_turns"][row]),
                **{name: extra[row][name] for name in ("num_tool_calls", "stop_reason") if name in extra[row]},
            },
        )
        for row, key in enumerate(keys)
    ]
