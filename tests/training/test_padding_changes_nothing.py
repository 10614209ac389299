"""Padding rows, anywhere and in any number, change no number of a step: scores, weights, metrics, counts and texts, to the bit.

To the bit, because rows without a policy token are in no micro-batch: the arithmetic of the trajectories is the very same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from asyncrl.config import TrainRun
from asyncrl.keys import TRAIN
from asyncrl.observe.trajectories import TrajectoryText
from asyncrl.ports import StepContext
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.invariants import check_batch
from asyncrl.protocol.padding import drop_padding, padded, with_padding
from asyncrl.protocol.ragged import from_values, lengths_of
from asyncrl.stages.advantage import advantage_stage
from asyncrl.stages.balance import balance
from asyncrl.stages.batch_metrics import batch_metrics_stage
from asyncrl.stages.old_log_prob import old_log_prob_stages
from asyncrl.stages.ref_log_prob import ref_log_prob_stage
from asyncrl.stages.trajectory_texts import first_trajectories, trajectory_texts
from asyncrl.stages.update_actor import update_actor_stage
from asyncrl.training.actor import Actor, Reference

MakeModel = Callable[..., Path]
MakeRun = Callable[..., TrainRun]
MakeColumns = Callable[..., TensorDict]

LENGTHS = [(3, 5), (3, 9), (6, 4), (6, 12), (2, 7), (2, 3), (5, 5), (5, 1), (5, 6)]
KEYS = ("a_0_0", "a_1_0", "b_0_0", "b_1_0", "c_0_0", "c_1_0", "d_0_0", "d_1_0", "d_1_1")
CONTEXT = StepContext(step=1, version=0, seed=0)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All that a step leaves behind of its trajectories."""

    weights: torch.Tensor
    metrics: dict[str, float]
    written: dict[str, list[float]]
    texts: list[TrajectoryText]
    num_tokens: int
    balanced: list[tuple[str, ...]]
    """Trajectories of each mini-batch and rank when two ranks share the batch."""


def sampled(make_columns: MakeColumns) -> tuple[KVBatchMeta, TensorDict]:
    """A batch as sampling gives it: every column that agents write and a stage reads."""
    columns = make_columns(LENGTHS).exclude("advantages")
    mask = columns["response_mask"]
    responses, policy = lengths_of(mask).tolist(), [int(row.sum()) for row in mask.unbind()]
    scores, last = torch.zeros(len(mask.values())), 0
    reward = torch.tensor([float(place % 3) * (tokens > 0) for place, tokens in enumerate(policy)])
    for score, row in zip(reward, mask.unbind(), strict=True):
        if row.any():
            scores[last + int(row.nonzero()[-1])] = score
        last += len(row)
    columns["rm_scores"] = from_values(scores, mask.offsets())
    columns["reward_score"] = reward
    columns["token_versions"] = from_values(mask.values().int() - 1, mask.offsets())
    columns["num_turns"] = torch.arange(1, len(KEYS) + 1)
    columns["extra_fields"] = NonTensorStack(*({"reward_extra_info": {"close": place % 2}} for place in range(len(KEYS))))
    tags = tuple(
        {"prompt_len": prompt, "response_len": response, "seq_len": prompt + response, "policy_len": tokens, "is_padding": False}
        for (prompt, _), response, tokens in zip(LENGTHS, responses, policy, strict=True)
    )
    return KVBatchMeta(partition_id=TRAIN, keys=KEYS, tags=tags), columns


def step(run: TrainRun, batch: KVBatchMeta, columns: TensorDict) -> Outcome:
    """Every box between sample and retire on a fresh actor, as the ranks would run them: with the padding rows of `batch`."""
    actor = Actor(run)
    old = old_log_prob_stages(run.old_log_probs, actor.log_probs)
    update = update_actor_stage(actor.update, columns={"ref_log_prob", *(["old_log_probs"] if old else [])})
    reference = ref_log_prob_stage(Reference(run).log_probs)
    stages = (*old, reference, advantage_stage(run.algorithm), update, batch_metrics_stage())
    whole, metrics = with_padding(batch, columns), dict[str, float]()
    for stage in stages:
        output = stage.compute(whole.select(*sorted(stage.reads)), batch, CONTEXT)
        metrics |= output.metrics
        whole = TensorDict({**dict(whole.items()), **output.columns}, batch_size=[len(batch)])
        check_batch(batch, whole)
    back, written = drop_padding(batch, whole)
    shown = first_trajectories(batch, 4)
    rows = [back.keys.index(key) for key in shown.keys]
    spread = balance(batch, 2, groups_each=run.mini_batch_groups)
    names = ("old_log_probs", "entropy", "ref_log_prob", "advantages", "returns", "token_level_rewards")
    return Outcome(
        weights=torch.cat([tensor.flatten() for tensor in actor.snapshot(0).tensors.values()]),
        metrics={**metrics, **spread.metrics, "updates": actor.updates},
        written={name: written[name].values().tolist() for name in names if name in set(written.keys())},
        texts=trajectory_texts(back.keys, written, lambda ids: " ".join(map(str, ids)))[: len(rows)],
        num_tokens=batch.num_tokens,
        balanced=[rows.without_padding().keys for rows in spread.mini_batches],
    )


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("groups_each", [2, 4])
def test_padding_rows_change_no_number(
    make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns, mode: str, groups_each: int
) -> None:
    """With 4 groups a mini-batch there is one update and the old log-probs are left out; with 2 they are recomputed."""
    options = {"loss_agg_mode": mode, "entropy_coeff": 0.01, "use_kl_loss": True, "ppo_mini_batch_size": groups_each}
    run = make_run(make_model(), actor={**options, "ppo_max_token_len_per_gpu": 40, "optim": {"lr": 0.01}})
    batch, columns = sampled(make_columns)
    expected = step(run, batch, columns)

    @given(st.lists(st.integers(0, len(KEYS)), min_size=1, max_size=12))
    @settings(max_examples=8)
    def with_rows_in_front_of(places: list[int]) -> None:
        wide = padded(batch, len(places))
        order = sorted(range(len(wide)), key=lambda row: (row, 1) if row < len(KEYS) else (places[row - len(KEYS)], 0))
        found = step(run, wide.select(order), columns)
        assert torch.equal(found.weights, expected.weights)
        for name in ("metrics", "written", "texts", "num_tokens", "balanced"):
            assert getattr(found, name) == getattr(expected, name), name

    with_rows_in_front_of()


def test_the_update_depends_on_the_order_of_rows_by_rounding_alone(
    make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns
) -> None:
    run = make_run(make_model(), actor={"ppo_max_token_len_per_gpu": 40, "optim": {"lr": 0.01}})
    columns = make_columns(LENGTHS)
    uids = [key[0] for key in KEYS]
    outcomes = []
    for order in (range(len(KEYS)), [8, 2, 0, 5, 7, 1, 3, 6, 4]):
        actor = Actor(run)
        rows = {str(name): [columns[name].unbind()[row] for row in order] for name in columns.keys()}  # noqa: SIM118
        jagged = {name: torch.nested.nested_tensor(column, layout=torch.jagged) for name, column in rows.items()}
        metrics = actor.update(TensorDict(jagged, batch_size=[len(KEYS)]), [uids[row] for row in order])
        outcomes.append((metrics, torch.cat([tensor.flatten() for tensor in actor.snapshot(0).tensors.values()])))
    (metrics, weights), (other_metrics, other_weights) = outcomes
    assert other_metrics == pytest.approx(metrics, abs=2e-5)
    # Adam turns a rounding error of a gradient near 0 into a step of its own size, hence the loose bound for few weights.
    assert float(((other_weights - weights).abs() > 1e-4).float().mean()) < 0.01
