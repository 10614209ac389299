"""Invariants of the mask: what is an action, and what may stand where there is none."""

import torch
from tensordict import TensorDict

from asyncrl.errors import FieldError
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.invariants.tokens import Tokens, names_of, present, refuse_outside_mask, refuse_rows, row_sums
from asyncrl.protocol.ragged import is_ragged, values_of

LOG_PROB_SLACK = 1e-5
"""A float32 log-softmax of a nearly certain token may come out a few units in the last place above 0."""

LOG_PROBS = ("rollout_log_probs", "old_log_probs", "ref_log_prob")

WEIGHTS = (
    "response_mask",
    "rm_scores",
    "reward_score",
    "token_level_scores",
    "token_level_rewards",
    "advantages",
    "returns",
    "values",
)
"""Fields through which a row can reach a loss, a metric or a count."""


def loss_mask_is_response_mask(meta: KVBatchMeta, columns: TensorDict) -> None:
    loss, response = values_of(columns["loss_mask"]), values_of(columns["response_mask"])
    for row, position, at in Tokens(columns["loss_mask"]).first(loss != response):
        raise FieldError(
            f"{meta.keys[row]}: fields 'loss_mask' and 'response_mask' differ at position {position}: "
            f"{bool(loss[at])} and {bool(response[at])}"
        )


def only_actions_have_a_log_prob(meta: KVBatchMeta, columns: TensorDict) -> None:
    """The engine's, the old and the reference's ones, and the entropy, those that are present."""
    for name in present(columns, *LOG_PROBS, "entropy"):
        refuse_outside_mask(meta, columns, name)


def log_probs_are_log_probs(meta: KVBatchMeta, columns: TensorDict) -> None:
    """Those that are present."""
    mask = values_of(columns["response_mask"])
    for name in present(columns, *LOG_PROBS):
        values = values_of(columns[name])
        wrong = mask & ~(torch.isfinite(values) & (values <= LOG_PROB_SLACK))
        for row, position, at in Tokens(columns[name]).first(wrong):
            found = float(values[at])
            raise FieldError(f"{meta.keys[row]}: field {name!r} is {found} at position {position}; allowed: finite and at most 0")


def score_sits_on_the_last_action(meta: KVBatchMeta, columns: TensorDict) -> None:
    """rm_scores is finite, and 0 but on the last action of a row, where it is `reward_score` if that is present."""
    tokens, scores = Tokens(columns["rm_scores"]), values_of(columns["rm_scores"])
    for row, position, at in tokens.first(~torch.isfinite(scores)):
        raise FieldError(f"{meta.keys[row]}: field 'rm_scores' is {float(scores[at])} at position {position}; allowed: finite")
    actions, bounds = tokens.chosen(values_of(columns["response_mask"]))
    acting = bounds.diff() > 0
    last = actions[bounds[1:][acting] - 1]
    misplaced = (scores != 0).index_fill(0, last, value=False)
    for row, position, at in tokens.first(misplaced):
        ends = [place for place in map(tokens.place, last.tolist()) if place[0] == row]
        where = f"the last action is at {ends[0][1]}" if ends else "the row has no action"
        raise FieldError(f"{meta.keys[row]}: field 'rm_scores' is {float(scores[at])} at position {position}; {where}")
    if "reward_score" in names_of(columns):
        expected = torch.where(acting, columns["reward_score"], torch.zeros_like(columns["reward_score"]))
        found = torch.zeros_like(expected).masked_scatter(acting, scores[last])
        refuse_rows(meta, found, expected, "field 'rm_scores' sums to", "but 'reward_score' is")


def advantages_stay_inside_the_mask(meta: KVBatchMeta, columns: TensorDict) -> None:
    """`advantages`, `returns` and `values`, those that are present."""
    for name in present(columns, "advantages", "returns", "values"):
        values = values_of(columns[name])
        for row, position, at in Tokens(columns[name]).first(~torch.isfinite(values)):
            raise FieldError(f"{meta.keys[row]}: field {name!r} is {float(values[at])} at position {position}; allowed: finite")
        refuse_outside_mask(meta, columns, name)


def padding_rows_weigh_nothing(meta: KVBatchMeta, columns: TensorDict) -> None:
    """A row tagged `is_padding` has no action and no reward, so no loss, metric or count can see it."""
    padding = [row for row, tag in enumerate(meta.tags) if tag.get("is_padding")]
    if not padding:
        return
    for name in present(columns, *WEIGHTS):
        column = columns[name]
        sums = row_sums(column.abs() if column.dtype != torch.bool else column) if is_ragged(column) else column.abs()
        for row in padding:
            if total := sums[row].item():
                raise FieldError(f"{meta.keys[row]}: a padding row has {name!r} summing to {total}; allowed: 0")
