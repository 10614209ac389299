"""The field invariants: what must hold of a batch at every stage border, each a plain function named after its promise.

    queue -> kv_batch_get -> [check_batch] -> stage -> [check_batch] -> kv_batch_put

`check_batch` runs 1-17, those whose columns are present; `check_shapes` 1-5 alone, which read lengths and no value. The rest need
facts that a batch does not have (group size, versions, other steps), and take them as arguments. A broken invariant raises
FieldError, which names the first offending key, the field, and the numbers. The checks are vectorised: none loops over tokens, and
only those about keys and tags loop over rows. In brackets: its number in docs/guarantees.md.

Rows, keys, tags (`rows.py`):
1. `one_row_a_key`                          as many rows as keys
2. `columns_fit_the_catalogue`              known names, dtypes, ragged where the catalogue has an axis
3. `keys_restore_the_hierarchy`             key = uid_session_index; siblings share the uid, in key and column alike
4. `columns_of_an_axis_are_aligned`         mask, log-probs, versions, ... have one length a row (I8)
5. `tags_spell_the_lengths`                 prompt_len, response_len, seq_len
6. `tags_spell_the_policy_length`           policy_len = response_mask.sum()
7. `input_ids_are_prompt_then_response`     in length and content
8. `position_ids_count_up`                  text: from 0, one a token; several axes: never negative

The mask (`actions.py`):
9. `loss_mask_is_response_mask`             one trainable mask
10. `only_actions_have_a_log_prob`          mask 0: log-prob and entropy 0
11. `log_probs_are_log_probs`               mask 1: finite and at most 0
12. `score_sits_on_the_last_action`         rm_scores is 0 elsewhere
13. `advantages_stay_inside_the_mask`       advantages, returns and values are finite, and 0 where the mask is
14. `padding_rows_weigh_nothing`            is_padding: no action, no reward, no advantage (I8)

Weight versions (`versions.py`):
15. `only_actions_have_a_version`           mask 0: version -1; mask 1: a version from 0
16. `versions_never_fall`                   along a trajectory, and from one trajectory of a session to the next
17. `tags_spell_the_versions`               min/max_global_steps of the actions; without any, the dispatch version
18. `actions_are_fresh`                     0 <= version - token_version <= max_staleness (I7)
19. `tags_are_fresh`                        the same from the tags alone (I7)

A batch against something else (`batches.py`):
20. `groups_are_whole`                      a sample is whole groups of one partition (I12)
21. `groups_stay_together`                  no group is split over two mini-batches
22. `parts_make_up_the_whole`               reorder, mini-batches, shards of the ranks: each key once, its tags unchanged (I9)
23. `one_writer_a_column`                   no stage writes what it read or what another wrote (I5)
24. `repeats_are_equal`                     who writes a column twice writes the same (I5)
25. `trained_once`                          a trajectory stands at most once among the steps of a lineage (I6)
26. `cleanup_leaves_nothing`                after retire or clear no key of the batch's groups is visible (I4)
27. `padding_and_back_is_the_identity`      ragged -> padded -> ragged (I8)
28. `mini_batches_divide_evenly`            rows of a mini-batch by the actor's data parallel size
29. `data_parallel_follows_the_actor`       actor DP = world / sequence parallel, whatever the rollout's parallelism

Source: 2-9, 14, 20-22, 26-29 and the mask half of 13 are the eleven of the data-protocol document; the rest are ours.
"""

from collections.abc import Callable
from typing import NamedTuple

from tensordict import TensorDict

from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.invariants.actions import (
    advantages_stay_inside_the_mask,
    log_probs_are_log_probs,
    loss_mask_is_response_mask,
    only_actions_have_a_log_prob,
    padding_rows_weigh_nothing,
    score_sits_on_the_last_action,
)
from asyncrl.protocol.invariants.batches import (
    cleanup_leaves_nothing,
    data_parallel_follows_the_actor,
    groups_are_whole,
    groups_stay_together,
    mini_batches_divide_evenly,
    one_writer_a_column,
    padding_and_back_is_the_identity,
    parts_make_up_the_whole,
    repeats_are_equal,
    trained_once,
)
from asyncrl.protocol.invariants.rows import (
    columns_fit_the_catalogue,
    columns_of_an_axis_are_aligned,
    input_ids_are_prompt_then_response,
    keys_restore_the_hierarchy,
    one_row_a_key,
    position_ids_count_up,
    tags_spell_the_lengths,
    tags_spell_the_policy_length,
)
from asyncrl.protocol.invariants.versions import (
    actions_are_fresh,
    only_actions_have_a_version,
    tags_are_fresh,
    tags_spell_the_versions,
    versions_never_fall,
)


class Invariant(NamedTuple):
    """`check` runs when all of `needs` are among the columns."""

    check: Callable[[KVBatchMeta, TensorDict], None]
    needs: frozenset[str]


def check_batch(meta: KVBatchMeta, columns: TensorDict) -> None:
    """Run every invariant whose columns are present. Raises FieldError for the first broken one."""
    _run(BATCH_INVARIANTS, meta, columns)


def check_shapes(meta: KVBatchMeta, columns: TensorDict) -> None:
    """Run those that read names, dtypes and lengths alone: a fraction of a millisecond whatever the number of tokens."""
    _run(SHAPE_INVARIANTS, meta, columns)


def _run(invariants: tuple[Invariant, ...], meta: KVBatchMeta, columns: TensorDict) -> None:
    present = frozenset(map(str, columns.keys()))
    for invariant in invariants:
        if invariant.needs <= present:
            invariant.check(meta, columns)


def _invariant(check: Callable[[KVBatchMeta, TensorDict], None], *needs: str) -> Invariant:
    return Invariant(check, frozenset(needs))


SHAPE_INVARIANTS: tuple[Invariant, ...] = (
    _invariant(one_row_a_key),
    _invariant(columns_fit_the_catalogue),
    _invariant(keys_restore_the_hierarchy),
    _invariant(columns_of_an_axis_are_aligned),
    _invariant(tags_spell_the_lengths),
)

BATCH_INVARIANTS: tuple[Invariant, ...] = (
    *SHAPE_INVARIANTS,  # first: the others rely on lengths and dtypes
    _invariant(tags_spell_the_policy_length, "response_mask"),
    _invariant(input_ids_are_prompt_then_response, "input_ids", "prompts", "responses"),
    _invariant(position_ids_count_up, "position_ids"),
    _invariant(loss_mask_is_response_mask, "loss_mask", "response_mask"),
    _invariant(only_actions_have_a_log_prob, "response_mask"),
    _invariant(log_probs_are_log_probs, "response_mask"),
    _invariant(score_sits_on_the_last_action, "rm_scores", "response_mask"),
    _invariant(advantages_stay_inside_the_mask, "response_mask"),
    _invariant(padding_rows_weigh_nothing),
    _invariant(only_actions_have_a_version, "token_versions", "response_mask"),
    _invariant(versions_never_fall, "token_versions", "response_mask"),
    _invariant(tags_spell_the_versions, "token_versions", "response_mask"),
)

__all__ = [
    "check_batch",
    "check_shapes",
    "Invariant",
    "SHAPE_INVARIANTS",
    "BATCH_INVARIANTS",
    "one_row_a_key",
    "columns_fit_the_catalogue",
    "keys_restore_the_hierarchy",
    "columns_of_an_axis_are_aligned",
    "tags_spell_the_lengths",
    "tags_spell_the_policy_length",
    "input_ids_are_prompt_then_response",
    "position_ids_count_up",
    "loss_mask_is_response_mask",
    "only_actions_have_a_log_prob",
    "log_probs_are_log_probs",
    "score_sits_on_the_last_action",
    "advantages_stay_inside_the_mask",
    "padding_rows_weigh_nothing",
    "only_actions_have_a_version",
    "versions_never_fall",
    "tags_spell_the_versions",
    "actions_are_fresh",
    "tags_are_fresh",
    "groups_are_whole",
    "groups_stay_together",
    "parts_make_up_the_whole",
    "one_writer_a_column",
    "repeats_are_equal",
    "trained_once",
    "cleanup_leaves_nothing",
    "padding_and_back_is_the_identity",
    "mini_batches_divide_evenly",
    "data_parallel_follows_the_actor",
]
