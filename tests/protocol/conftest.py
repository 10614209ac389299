"""A whole batch that keeps every invariant, for tests that break one thing of it."""

from collections.abc import Callable

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from asyncrl.keys import TRAIN
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.ragged import ragged

Batch = tuple[KVBatchMeta, TensorDict]

# key, prompt, response, mask, versions (per response token), score. The third row is the second trajectory of the second session;
# the last has no action at all.
_ROWS: list[tuple[str, list[int], list[int], list[int], list[int], float]] = [
    ("u1_0_0", [1, 2, 3], [4, 5, 6, 7], [1, 1, 0, 1], [2, 2, -1, 3], 1.0),
    ("u1_1_0", [1, 2, 3], [8, 9], [1, 0], [2, -1], 0.0),
    ("u1_1_1", [1], [8, 9, 10], [0, 1, 1], [-1, 2, 2], 0.5),
    ("u2_0_0", [5, 5], [], [], [], 0.0),
]


def _column(rows: list[list[int]], dtype: torch.dtype, scale: float = 1) -> torch.Tensor:
    return ragged([torch.tensor([value * scale for value in row]).to(dtype) for row in rows])


@pytest.fixture
def make_batch() -> Callable[[], Batch]:
    """Returns a fresh batch of four trajectories of two groups at each call."""

    def make() -> Batch:
        keys, prompts, responses, masks, versions, scores = (list(column) for column in zip(*_ROWS, strict=True))
        last = [max((at for at, on in enumerate(mask) if on), default=-1) for mask in masks]
        rewards = [[score * (at == end) for at in range(len(mask))] for score, end, mask in zip(scores, last, masks, strict=True)]
        sequences = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        columns = TensorDict(
            {
                "uid": NonTensorStack(*(key.split("_")[0] for key in keys)),
                "session_id": torch.tensor([int(key.split("_")[1]) for key in keys]),
                "prompts": _column(prompts, torch.int64),
                "responses": _column(responses, torch.int64),
                "input_ids": _column(sequences, torch.int64),
                "position_ids": _column([list(range(len(row))) for row in sequences], torch.int64),
                "response_mask": _column(masks, torch.bool),
                "loss_mask": _column(masks, torch.bool),
                "rollout_log_probs": _column(masks, torch.float32, -0.5),
                "old_log_probs": _column(masks, torch.float32, -0.25),
                "entropy": _column(masks, torch.float32, 0.75),
                "ref_log_prob": _column(masks, torch.float32, -0.75),
                "token_versions": _column(versions, torch.int32),
                "rm_scores": _column(rewards, torch.float32),
                "reward_score": torch.tensor(scores),
                "advantages": _column(masks, torch.float32, -1.5),
                "returns": _column(masks, torch.float32, 2.0),
                "values": _column(masks, torch.float32, 3.0),
            },
            batch_size=[len(keys)],
        )
        tags = []
        for prompt, response, mask, version in zip(prompts, responses, masks, versions, strict=True):
            sampled = [number for number in version if number >= 0] or [2]
            lengths = {"prompt_len": len(prompt), "response_len": len(response), "seq_len": len(prompt) + len(response)}
            steps = {"global_steps": 2, "min_global_steps": min(sampled), "max_global_steps": max(sampled)}
            tags.append({"status": "finished", "policy_len": sum(mask), "is_padding": False, **lengths, **steps})
        return KVBatchMeta(partition_id=TRAIN, keys=tuple(keys), tags=tuple(tags)), columns

    return make
