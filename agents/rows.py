"""From a scored trajectory to the columns and tags of its row in the TransferQueue.

Place: session -> [rows] -> transfer_queue. Names, dtypes and axes are those of `asyncrl.fields`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.agents.loop import AgentLoopOutput
from asyncrl.fields import Tag
from asyncrl.keys import TrajectoryKey
from asyncrl.ports import GroupStatus, Json, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """All trajectories of a session: keys, columns (one value a key) and tags."""

    keys: list[str]
    fields: dict[str, list[Json]]
    tags: list[Tag]


def rows_of(
    prompt: Prompt, session_id: int, outputs: Sequence[AgentLoopOutput], *, version: int, baseline: float | None = None
) -> Rows:
    """`version`: the weights' when the session was dispatched. Every output has a reward and a policy token. `baseline`: the
    score of the group's greedy session, where there is one."""
    columns = [_columns(prompt, session_id, output) for output in outputs]
    if baseline is not None:
        columns = [{**row, "reward_baselines": baseline} for row in columns]
    return Rows(
        keys=[str(TrajectoryKey(uid=prompt.uid, session_id=session_id, index=index)) for index in range(len(outputs))],
        fields={name: [row[name] for row in columns] for name in columns[0]},
        tags=[trajectory_tag(output, version=version) for output in outputs],
    )


def _columns(prompt: Prompt, session_id: int, output: AgentLoopOutput) -> dict[str, Json]:
    # Plain numbers, not tensors: the store packs them in a fraction of the time that torch takes to make a small tensor.
    assert output.reward_score is not None
    ids = output.prompt_ids + output.response_ids
    return {
        "prompts": output.prompt_ids,
        "responses": output.response_ids,
        "input_ids": ids,
        "position_ids": list(range(len(ids))),
        "response_mask": output.response_mask,
        "loss_mask": output.response_mask,
        "rollout_log_probs": output.response_logprobs,
        "token_versions": output.token_versions,
        "rm_scores": score_on_last_policy_token(output.response_mask, output.reward_score),
        "reward_score": output.reward_score,
        "session_id": session_id,
        "num_turns": output.num_turns,
        "uid": prompt.uid,
        "data_source": prompt.data_source,
        "raw_prompt": prompt.messages,
        "extra_fields": output.extra_fields,
    }


def score_on_last_policy_token(mask: Sequence[int], score: float) -> list[float]:
    """[R]: zeros, and the score where the policy spoke last, never on an observation. mask: 1 on policy tokens."""
    scores = [0.0] * len(mask)
    scores[len(mask) - 1 - mask[::-1].index(1)] = score
    return scores


def trajectory_tag(output: AgentLoopOutput, *, version: int) -> Tag:
    """Cheap metadata of a row; `version` stands in for the oldest and newest version where no policy token has one."""
    versions = [sampled for sampled, mask in zip(output.token_versions, output.response_mask, strict=True) if mask]
    prompt_len, response_len = len(output.prompt_ids), len(output.response_ids)
    return {
        "status": GroupStatus.FINISHED,
        "global_steps": version,
        "prompt_len": prompt_len,
        "response_len": response_len,
        "seq_len": prompt_len + response_len,
        "policy_len": output.policy_len,
        "score": float(output.reward_score or 0.0),
        "min_global_steps": min(versions, default=version),
        "max_global_steps": max(versions, default=version),
        "is_padding": False,
    }
