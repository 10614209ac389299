"""Each invariant is broken on purpose and seen caught, with the key, the field and the numbers in the message."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from asyncrl.errors import FieldError
from asyncrl.fields import TagValue
from asyncrl.protocol import invariants
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.invariants import actions, batches, rows, versions
from asyncrl.protocol.ragged import lengths_of, ragged, rows_of

Batch = tuple[KVBatchMeta, TensorDict]
MakeBatch = Callable[[], Batch]
MODULES = (rows, actions, versions, batches)
Break = Callable[[KVBatchMeta, TensorDict], Batch]


def write(field: str, row: int, position: int, value: float) -> Break:
    """Overwrite one entry of a ragged column."""

    def damage(meta: KVBatchMeta, columns: TensorDict) -> Batch:
        rows_of(columns[field])[row][position] = value
        return meta, columns

    return damage


def retag(row: int, **changes: TagValue) -> Break:
    def damage(meta: KVBatchMeta, columns: TensorDict) -> Batch:
        tags = [dict(tag) for tag in meta.tags]
        tags[row].update(changes)
        return KVBatchMeta(partition_id=meta.partition_id, keys=meta.keys, tags=tuple(tags)), columns

    return damage


def replace(field: str, column: object) -> Break:
    def damage(meta: KVBatchMeta, columns: TensorDict) -> Batch:
        columns[field] = column
        return meta, columns

    return damage


def shorten(field: str, row: int) -> Break:
    """Cut the last entry off one row."""

    def damage(meta: KVBatchMeta, columns: TensorDict) -> Batch:
        rows = rows_of(columns[field])
        rows[row] = rows[row][:-1]
        columns[field] = ragged(rows)
        return meta, columns

    return damage


def several_axes(*entry: int) -> Break:
    """Position ids of several axes, the same entry at every token."""

    def damage(meta: KVBatchMeta, columns: TensorDict) -> Batch:
        rows = [torch.tensor([entry] * int(length)) for length in lengths_of(columns["input_ids"])]
        return replace("position_ids", ragged(rows))(meta, columns)

    return damage


def without(damage: Break, field: str) -> Break:
    """The same damage in a batch that lacks a column."""
    return lambda meta, columns: damage(meta, columns.exclude(field))


def padding_with_advantage(meta: KVBatchMeta, columns: TensorDict) -> Batch:
    """Row 3 has no response, so it is given one that nobody sampled."""
    columns = TensorDict({"response_mask": columns["response_mask"], "advantages": columns["advantages"]}, batch_size=[4])
    for field, entry in (("response_mask", torch.tensor([False])), ("advantages", torch.tensor([0.75]))):
        columns[field] = ragged([*rows_of(columns[field])[:3], entry])
    return retag(3, is_padding=True, response_len=1)(meta, columns)


def drop_first_row(meta: KVBatchMeta, columns: TensorDict) -> Batch:
    return meta.select(range(1, len(meta))), columns


def pad_tag_with_reward(meta: KVBatchMeta, columns: TensorDict) -> Batch:
    meta, columns = retag(3, is_padding=True)(meta, columns)
    return replace("reward_score", torch.tensor([1.0, 0.0, 0.5, 0.25]))(meta, columns)


BROKEN: list[tuple[str, Break, str]] = [
    ("one_row_a_key", drop_first_row, "3 keys from 'u1_1_0' on, but the columns have batch size [4]"),
    ("columns_fit_the_catalogue", replace("nonsense", torch.zeros(4)), "field 'nonsense' is not in the catalogue"),
    ("columns_fit_the_catalogue", replace("session_id", torch.zeros(4)), "'session_id' has dtype torch.float32, the catalogue"),
    ("columns_fit_the_catalogue", replace("values", torch.zeros(4)), "field 'values' is not ragged, but its axis is 'response'"),
    ("columns_fit_the_catalogue", replace("uid", torch.zeros(4)), "field 'uid' holds Tensor, the catalogue says object"),
    ("keys_restore_the_hierarchy", replace("uid", NonTensorStack("u1", "u1", "u1", "u1")), "u2_0_0: field 'uid' is 'u1'"),
    ("keys_restore_the_hierarchy", replace("session_id", torch.tensor([0, 1, 0, 0])), "u1_1_1: field 'session_id' is 0"),
    ("columns_of_an_axis_are_aligned", shorten("rollout_log_probs", 1), "u1_1_0: field 'rollout_log_probs' has 1 entries, but"),
    ("columns_of_an_axis_are_aligned", shorten("position_ids", 0), "u1_0_0: field 'position_ids' has 6 entries, but 'input_ids'"),
    ("columns_of_an_axis_are_aligned", shorten("prompts", 0), "has 7 entries, but prompt and response have 6"),
    ("columns_fit_the_catalogue", replace("values", ragged([torch.ones(4, 2)] * 4)), "field 'values' has entries of shape [2]"),
    ("columns_fit_the_catalogue", replace("position_ids", ragged([torch.ones(4, 3, 1).long()] * 4)), "has entries of shape [3, 1]"),
    ("position_ids_count_up", write("position_ids", 0, 3, 4), "u1_0_0: field 'position_ids' is 4 at position 3; allowed: 3, text"),
    ("position_ids_count_up", write("position_ids", 2, 3, 2), "u1_1_1: field 'position_ids' is 2 at position 3; allowed: 3, text"),
    ("position_ids_count_up", write("position_ids", 3, 0, 1), "u2_0_0: field 'position_ids' is 1 at position 0; allowed: 0, text"),
    ("position_ids_count_up", several_axes(0, -1, 2), "u1_0_0: field 'position_ids' is [0, -1, 2] at position 0; allowed: 0 and"),
    ("tags_spell_the_lengths", without(retag(1, response_len=3), "responses"), "u1_1_0: tag 'response_len' is 3, but the length"),
    ("score_sits_on_the_last_action", write("rm_scores", 0, 3, float("nan")), "u1_0_0: field 'rm_scores' is nan at position 3"),
    ("padding_rows_weigh_nothing", padding_with_advantage, "u2_0_0: a padding row has 'advantages' summing to 0.75; allowed: 0"),
    ("input_ids_are_prompt_then_response", write("input_ids", 2, 3, 99), "u1_1_1: field 'input_ids' is 99 at position 3"),
    ("tags_spell_the_lengths", retag(0, prompt_len=4), "u1_0_0: tag 'prompt_len' is 4, but the length of 'prompts' is 3"),
    ("tags_spell_the_lengths", retag(1, response_len=3), "u1_1_0: tag 'response_len' is 3, but the length of 'responses' is 2"),
    ("tags_spell_the_lengths", retag(0, seq_len=6), "u1_0_0: tag 'seq_len' is 6, but the length of 'input_ids' is 7"),
    ("tags_spell_the_policy_length", retag(0, policy_len=4), "u1_0_0: tag 'policy_len' is 4, but 'response_mask'.sum() is 3"),
    ("loss_mask_is_response_mask", write("loss_mask", 0, 2, 1), "u1_0_0: fields 'loss_mask' and 'response_mask' differ at"),
    ("only_actions_have_a_log_prob", write("rollout_log_probs", 0, 2, -0.5), "u1_0_0: field 'rollout_log_probs' is -0.5 at"),
    ("only_actions_have_a_log_prob", write("old_log_probs", 0, 2, -0.5), "u1_0_0: field 'old_log_probs' is -0.5 at position 2"),
    ("only_actions_have_a_log_prob", write("ref_log_prob", 0, 2, float("nan")), "u1_0_0: field 'ref_log_prob' is nan at"),
    ("only_actions_have_a_log_prob", write("entropy", 0, 2, 1.0), "u1_0_0: field 'entropy' is 1.0 at position 2"),
    ("only_actions_have_a_version", write("token_versions", 1, 1, 2), "u1_1_0: field 'token_versions' is 2 at position 1"),
    ("only_actions_have_a_version", write("token_versions", 0, 0, -1), "allowed: a version from 0"),
    ("log_probs_are_log_probs", write("rollout_log_probs", 0, 3, 0.5), "u1_0_0: field 'rollout_log_probs' is 0.5 at position 3"),
    ("log_probs_are_log_probs", write("old_log_probs", 2, 1, float("-inf")), "u1_1_1: field 'old_log_probs' is -inf at position 1"),
    ("log_probs_are_log_probs", write("ref_log_prob", 2, 1, float("nan")), "u1_1_1: field 'ref_log_prob' is nan at position 1"),
    ("versions_never_fall", write("token_versions", 0, 3, 1), "u1_0_0: field 'token_versions' falls from 2 to 1 at position 3"),
    ("versions_never_fall", write("token_versions", 1, 0, 3), "u1_1_1: its first token version is 2, but the earlier"),
    ("tags_spell_the_versions", retag(0, min_global_steps=1), "u1_0_0: tag 'min_global_steps' is 1, but what 'token_versions'"),
    ("tags_spell_the_versions", retag(0, max_global_steps=2), "u1_0_0: tag 'max_global_steps' is 2, but what 'token_versions'"),
    ("tags_spell_the_versions", retag(3, max_global_steps=3), "u2_0_0: tag 'max_global_steps' is 3, but what 'token_versions'"),
    ("score_sits_on_the_last_action", write("rm_scores", 0, 1, 1.0), "'rm_scores' is 1.0 at position 1; the last action is at 3"),
    ("score_sits_on_the_last_action", write("rm_scores", 2, 2, 0.25), "field 'rm_scores' sums to 0.25 but 'reward_score' is 0.5"),
    ("advantages_stay_inside_the_mask", write("advantages", 1, 1, 0.5), "u1_1_0: field 'advantages' is 0.5 at position 1"),
    ("advantages_stay_inside_the_mask", write("returns", 2, 0, 0.5), "u1_1_1: field 'returns' is 0.5 at position 0"),
    ("advantages_stay_inside_the_mask", write("values", 1, 1, 0.5), "u1_1_0: field 'values' is 0.5 at position 1"),
    ("advantages_stay_inside_the_mask", write("advantages", 0, 0, float("nan")), "u1_0_0: field 'advantages' is nan at position 0"),
    ("padding_rows_weigh_nothing", retag(1, is_padding=True), "u1_1_0: a padding row has 'response_mask' summing to 1"),
    ("padding_rows_weigh_nothing", pad_tag_with_reward, "u2_0_0: a padding row has 'reward_score' summing to 0.25"),
]  # fmt: skip


def test_a_whole_batch_keeps_every_invariant(make_batch: MakeBatch) -> None:
    meta, columns = make_batch()
    present = set(map(str, columns.keys()))
    assert all(invariant.needs <= present for invariant in invariants.BATCH_INVARIANTS), "the batch must exercise all of them"
    invariants.check_batch(meta, columns)
    invariants.padding_and_back_is_the_identity(meta, columns)


@pytest.mark.parametrize(
    ("name", "damage", "message"), BROKEN, ids=[f"{name}-{number}" for number, (name, _, _) in enumerate(BROKEN)]
)
def test_a_broken_invariant_is_caught_and_named(make_batch: MakeBatch, name: str, damage: Break, message: str) -> None:
    meta, columns = damage(*make_batch())
    with pytest.raises(FieldError, match=re.escape(message)):
        getattr(invariants, name)(meta, columns)
    with pytest.raises(FieldError):
        invariants.check_batch(meta, columns)


def test_every_invariant_has_a_test_that_breaks_it() -> None:
    tested = {name for name, _, _ in BROKEN}
    assert tested == {invariant.check.__name__ for invariant in invariants.BATCH_INVARIANTS}


def test_the_docstring_lists_every_invariant() -> None:
    listed = re.findall(r"^\d+\. `(\w+)`", invariants.__doc__ or "", re.MULTILINE)
    checked = [invariant.check.__name__ for invariant in invariants.BATCH_INVARIANTS]
    assert listed[: len(checked)] == checked
    assert all(callable(getattr(invariants, name)) for name in listed)


def test_check_batch_runs_only_what_the_columns_allow(make_batch: MakeBatch) -> None:
    meta, columns = make_batch()
    invariants.check_batch(meta, columns.select("advantages", "response_mask"))
    invariants.check_batch(meta, columns.select("rm_scores"))


@pytest.mark.parametrize("rows", [[0], [3], [3, 2, 1, 0]])
def test_any_selection_of_rows_keeps_every_invariant(make_batch: MakeBatch, rows: list[int]) -> None:
    meta, columns = make_batch()
    invariants.check_batch(meta.select(rows), columns[rows])


def test_reorder_and_split_keep_identity(make_batch: MakeBatch) -> None:
    meta, _ = make_batch()
    invariants.parts_make_up_the_whole(meta, [meta.select([2, 0, 3, 1])])
    invariants.parts_make_up_the_whole(meta, [meta.select([3]), meta.select([2, 0, 1])])


def test_lost_doubled_and_altered_rows_are_caught(make_batch: MakeBatch) -> None:
    meta, columns = make_batch()
    with pytest.raises(FieldError, match=r"u1_1_0: in no part of its batch; 1 of 4 rows are lost"):
        invariants.parts_make_up_the_whole(meta, [meta.select([0, 2, 3])])
    with pytest.raises(FieldError, match="u1_0_0: in two parts"):
        invariants.parts_make_up_the_whole(meta, [meta.select([0, 1]), meta.select([0, 2, 3])])
    altered, _ = retag(1, max_global_steps=7)(meta, columns)
    with pytest.raises(FieldError, match="u1_1_0: tag changed from"):
        invariants.parts_make_up_the_whole(meta, [altered])


def test_a_group_in_two_mini_batches_is_caught(make_batch: MakeBatch) -> None:
    meta, _ = make_batch()
    invariants.groups_stay_together([meta.select([0, 1, 2]), meta.select([3])])
    with pytest.raises(FieldError, match=r"u1_1_1: its group 'u1' is split over parts 0 and 1"):
        invariants.groups_stay_together([meta.select([0, 1]), meta.select([2, 3])])


def test_data_parallel_size_taken_from_the_rollout_is_caught() -> None:
    invariants.data_parallel_follows_the_actor(world_size=8, sequence_parallel=2, data_parallel=4)
    with pytest.raises(FieldError, match="data parallel 8 x sequence parallel 2 = 16, but the actor has 8 ranks"):
        invariants.data_parallel_follows_the_actor(world_size=8, sequence_parallel=2, data_parallel=8)


def test_left_over_keys_are_caught(make_batch: MakeBatch) -> None:
    meta, _ = make_batch()
    invariants.cleanup_leaves_nothing(meta, ["u3", "u3_0_0", "u1x_0_0"])
    with pytest.raises(FieldError, match="u2_7_0: still in partition 'train'"):
        invariants.cleanup_leaves_nothing(meta, ["u3_0_0", "u2_7_0"])
    with pytest.raises(FieldError, match=r"u1: still in partition 'train' .* one of 2 of a batch"):
        invariants.cleanup_leaves_nothing(meta, ["u1"])
    with pytest.raises(FieldError, match="a_b: still in partition"):
        invariants.cleanup_leaves_nothing(keys("a_b_0_0"), ["a", "a_b"])


# --- staleness --------------------------------------------------------------------------------------------------------------------


def test_what_is_too_old_or_from_the_future_is_caught(make_batch: MakeBatch) -> None:
    """The batch has actions of the versions 2 and 3; observations have -1, which is no age."""
    meta, columns = make_batch()
    invariants.actions_are_fresh(meta, columns, version=3, max_staleness=1)
    invariants.tags_are_fresh(meta, version=3, max_staleness=1)
    with pytest.raises(
        FieldError, match="u1_0_0: field 'token_versions' is 2 at position 0; allowed: 3 to 3, for weights of version 3"
    ):
        invariants.actions_are_fresh(meta, columns, version=3, max_staleness=0)
    with pytest.raises(FieldError, match=r"u1_0_0: tag 'min_global_steps' is 2; allowed: 3 to 3, .* max_staleness 0"):
        invariants.tags_are_fresh(meta, version=3, max_staleness=0)
    with pytest.raises(FieldError, match="u1_0_0: field 'token_versions' is 3 at position 3; allowed: 1 to 2"):
        invariants.actions_are_fresh(meta, columns, version=2, max_staleness=1)
    with pytest.raises(FieldError, match="u1_0_0: tag 'max_global_steps' is 3; allowed: 1 to 2"):
        invariants.tags_are_fresh(meta, version=2, max_staleness=1)


def test_a_row_without_an_action_has_no_age(make_batch: MakeBatch) -> None:
    meta, columns = make_batch()
    alone, rows = meta.select([3]), columns[[3]]
    invariants.actions_are_fresh(alone, rows, version=9, max_staleness=0)
    invariants.tags_are_fresh(alone, version=9, max_staleness=0)


# --- whole groups -----------------------------------------------------------------------------------------------------------------


def keys(*names: str, partition_id: str = "train", **tag: TagValue) -> KVBatchMeta:
    return KVBatchMeta(partition_id=partition_id, keys=names, tags=tuple(tag for _ in names))


def test_a_sample_of_part_of_a_group_is_caught() -> None:
    whole = keys("b_1_0", "a_0_0", "a_1_1", "a_1_0", "b_0_0")
    invariants.groups_are_whole(whole, group_size=2, partition_id="train")
    with pytest.raises(FieldError, match=r"group 'b' has rows of the sessions \[1\]; allowed: each of 0 to 1"):
        invariants.groups_are_whole(whole.select([0, 1, 2, 3]), group_size=2, partition_id="train")
    with pytest.raises(FieldError, match=r"group 'a' has the trajectories \[1\] of its session 1; allowed: 0, 1, ... in a row"):
        invariants.groups_are_whole(whole.select([1, 2]), group_size=2, partition_id="train")
    with pytest.raises(FieldError, match=r"group 'b' has rows of the sessions \[0, 1\]; allowed: each of 0 to 0"):
        invariants.groups_are_whole(whole, group_size=1, partition_id="train")
    with pytest.raises(FieldError, match=r"group 'c' has rows of the sessions \[0, 2\]; allowed: each of 0 to 1"):
        invariants.groups_are_whole(keys("c_0_0", "c_2_0"), group_size=2, partition_id="train")
    with pytest.raises(FieldError, match="b_1_0: from partition 'train'; allowed: 'val'"):
        invariants.groups_are_whole(whole, group_size=2, partition_id="val")


def test_a_padding_row_is_in_no_group() -> None:
    whole, padding = keys("a_0_0"), keys("pad_7_7", is_padding=True)
    both = KVBatchMeta(partition_id="train", keys=whole.keys + padding.keys, tags=whole.tags + padding.tags)
    invariants.groups_are_whole(both, group_size=1, partition_id="train")


# --- one writer, once -------------------------------------------------------------------------------------------------------------


def test_a_second_writer_of_a_column_is_caught() -> None:
    meta, writers = keys("a_0_0", "a_1_0"), {"returns": "advantage"}
    invariants.one_writer_a_column(meta, ["returns", "entropy"], writer="advantage", writers=writers)
    with pytest.raises(FieldError, match="a_0_0: field 'returns' of its 2 rows is written by 'values', but 'advantage' has"):
        invariants.one_writer_a_column(meta, ["entropy", "returns"], writer="values", writers=writers)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (write("returns", 2, 1, 7), "u1_1_1: field 'returns' written again by 'advantage' is 7.0 at position 1, but it was 2.0"),
        (shorten("returns", 0), "u1_0_0: field 'returns' written again by 'advantage' has 3 entries, not 4"),
        (replace("reward_score", torch.tensor([1.0, 0.0, 0.5, 9.0])), "u2_0_0: field 'reward_score' written again by"),
        (replace("uid", NonTensorStack("u1", "u1", "u1", "u9")), "u2_0_0: field 'uid' written again by 'advantage' is 'u9', but"),
    ],
)  # fmt: skip
def test_a_repeat_that_differs_is_caught(make_batch: MakeBatch, damage: Break, message: str) -> None:
    meta, before = make_batch()
    _, again = make_batch()
    for column in (before, again):
        rows_of(column["returns"])[0][0] = float("nan")
    invariants.repeats_are_equal(meta, before, again, writer="advantage")
    _, after = damage(*make_batch())
    with pytest.raises(FieldError, match=re.escape(message)):
        invariants.repeats_are_equal(meta, make_batch()[1], after, writer="advantage")


def test_a_trajectory_in_two_steps_is_caught() -> None:
    lineage = {1: ("a_0_0", "a_1_0"), 2: ("b_0_0", "b_1_0")}
    invariants.trained_once(keys("c_0_0"), step=3, lineage=lineage)
    invariants.trained_once(keys("b_0_0", "b_1_0"), step=2, lineage=lineage)
    with pytest.raises(FieldError, match="a_1_0: trained in step 1 and again in step 3; allowed: once in a lineage"):
        invariants.trained_once(keys("c_0_0", "a_1_0"), step=3, lineage=lineage)
    with pytest.raises(FieldError, match="b_1_0: step 2 was recorded with 2 keys, now has 1"):
        invariants.trained_once(keys("b_0_0"), step=2, lineage=lineage)
    with pytest.raises(FieldError, match="b_1_0: step 2 was recorded with 2 keys, now has 2, not the same"):
        invariants.trained_once(keys("b_1_0", "b_0_0"), step=2, lineage=lineage)


# --- layout and mesh --------------------------------------------------------------------------------------------------------------


def test_a_mini_batch_that_the_ranks_cannot_share_is_caught() -> None:
    parts = [keys("a_0_0", "a_1_0"), keys("b_0_0", "b_1_0", "b_2_0")]
    invariants.mini_batches_divide_evenly(parts, data_parallel=1)
    with pytest.raises(FieldError, match="b_2_0: mini-batch 1 has 3 rows for data parallel 2, 1 too many; fill it"):
        invariants.mini_batches_divide_evenly(parts, data_parallel=2)


def test_a_layout_that_loses_a_number_is_caught(make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout itself is right for every input, so a wrong way back is put in its place."""
    meta, columns = make_batch()
    for damage, message in (
        (write("input_ids", 2, 3, 99), "u1_1_1: padding and back changes field 'input_ids' at position 3"),
        (shorten("input_ids", 0), "u1_0_0: padding and back gives field 'input_ids' 6 entries, not 7"),
    ):
        _, wrong = damage(*make_batch())
        monkeypatch.setattr(batches, "unpad_field", lambda data, name, padded, wrong=wrong: wrong[name])
        with pytest.raises(FieldError, match=message):
            invariants.padding_and_back_is_the_identity(meta, columns)


OTHERS = {
    "actions_are_fresh", "tags_are_fresh", "groups_are_whole", "groups_stay_together", "parts_make_up_the_whole",
    "one_writer_a_column", "repeats_are_equal", "trained_once", "cleanup_leaves_nothing", "padding_and_back_is_the_identity",
    "mini_batches_divide_evenly", "data_parallel_follows_the_actor",
}  # fmt: skip
"""Invariants that need more than a batch: each has its own test above."""


def test_the_docstring_is_complete() -> None:
    """Every function that can refuse stands in the list, in the package's doors, and nowhere twice."""
    listed = re.findall(r"^(\d+)\. `(\w+)`", invariants.__doc__ or "", re.MULTILINE)
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    names = [name for _, name in listed]
    assert len(set(names)) == len(names)
    checked = {invariant.check.__name__ for invariant in invariants.BATCH_INVARIANTS}
    assert set(names) == checked | OTHERS
    public = {name for module in MODULES for name, value in vars(module).items() if is_own(module, name, value)}
    assert public == set(names) <= set(invariants.__all__)
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in sorted(OTHERS) if f"invariants.{name}(" not in source] == []


def is_own(module: ModuleType, name: str, value: object) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
