"""The field invariants: what must hold of a batch at every stage border, each a plain function named after its promise.

    queue -> kv_batch_get -> [check_batch] -> stage -> [check_batch] -> kv_batch_put

`check_batch` runs those whose columns are present; the last section holds those that compare a batch with something else.
A broken invariant raises FieldError, which names the first offending key, the field, and the numbers. The checks are vectorised:
none loops over tokens, and only those about keys and tags loop over rows.

1. `one_row_a_key`                          as many rows as keys
2. `columns_fit_the_catalogue`              known names, dtypes, ragged where the catalogue has an axis
3. `keys_restore_the_hierarchy`             key = uid_session_index; siblings share the uid, in key and column alike
4. `columns_of_an_axis_are_aligned`         mask, log-probs, versions, ... have one length a row
5. `input_ids_are_prompt_then_response`     in length and content
6. `tags_spell_the_lengths`                 prompt_len, response_len, seq_len, policy_len
7. `loss_mask_is_response_mask`             one trainable mask
8. `only_actions_have_a_log_prob`           mask 0: rollout log-prob 0
9. `only_actions_have_a_version`            mask 0: version -1; mask 1: a version from 0
10. `log_probs_are_log_probs`               mask 1: finite and at most 0
11. `versions_never_fall`                   along a trajectory, and from one trajectory of a session to the next
12. `tags_spell_the_versions`               min/max_global_steps of the actions; without any, the dispatch version
13. `score_sits_on_the_last_action`         rm_scores is 0 elsewhere
14. `advantages_stay_inside_the_mask`       advantages and returns are finite, and 0 where the mask is
15. `padding_rows_weigh_nothing`            is_padding: no action, no reward
16. `parts_make_up_the_whole`               reorder, mini-batches, shards of the ranks: each key once, its tags unchanged
17. `groups_stay_together`                  no group is split over two mini-batches
18. `data_parallel_follows_the_actor`       actor DP = world / sequence parallel, whatever the rollout's parallelism
19. `padding_and_back_is_the_identity`      ragged -> padded -> ragged
20. `cleanup_leaves_nothing`                after retire or clear no trajectory of the batch's groups is left

Source: 2-7, 15-20 and the first half of 14 are the eleven of the data-protocol document; the rest are ours.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDict

from asyncrl.errors import FieldError
from asyncrl.fields import Axis
from asyncrl.fields import field as catalogue_field
from asyncrl.keys import TrajectoryKey
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.data_proto import pad_batch, unpad_field
from asyncrl.protocol.ragged import is_ragged, lengths_of

LOG_PROB_SLACK = 1e-5
"""A float32 log-softmax of a nearly certain token may come out a few units in the last place above 0."""


class Invariant(NamedTuple):
    """`check` runs when all of `needs` are among the columns."""

    check: Callable[[KVBatchMeta, TensorDict], None]
    needs: frozenset[str]


def check_batch(meta: KVBatchMeta, columns: TensorDict) -> None:
    """Run every invariant whose columns are present. Raises FieldError for the first broken one."""
    present = frozenset(map(str, columns.keys()))
    for invariant in BATCH_INVARIANTS:
        if invariant.needs <= present:
            invariant.check(meta, columns)


# --- rows, keys and tags ----------------------------------------------------------------------------------------------------------


def one_row_a_key(meta: KVBatchMeta, columns: TensorDict) -> None:
    if columns.batch_size[:1] != torch.Size([len(meta)]):
        raise FieldError(f"{len(meta)} keys, but the columns have batch size {list(columns.batch_size)}")


def columns_fit_the_catalogue(meta: KVBatchMeta, columns: TensorDict) -> None:
    """A known name, the catalogue's dtype, and ragged exactly where the field has an axis."""
    for name in _names(columns):
        entry, column = catalogue_field(name), columns.get(name)
        if entry.is_tensor != isinstance(column, torch.Tensor):
            raise FieldError(f"field {name!r} holds {type(column).__name__}, the catalogue says {entry.dtype}")
        if not entry.is_tensor:
            continue
        if column.dtype != getattr(torch, entry.dtype):
            raise FieldError(f"field {name!r} has dtype {column.dtype}, the catalogue says {entry.dtype}")
        if is_ragged(column) != (entry.axis is not Axis.NONE):
            layout = "ragged" if is_ragged(column) else "not ragged"
            raise FieldError(f"field {name!r} is {layout}, but its axis is {entry.axis.value!r}")


def keys_restore_the_hierarchy(meta: KVBatchMeta, columns: TensorDict) -> None:
    """Every key spells (uid, session, index), and the columns `uid` and `session_id` agree with it."""
    parsed = [TrajectoryKey.parse(key) for key in meta.keys]
    uids = columns.get("uid").tolist() if "uid" in _names(columns) else [key.uid for key in parsed]
    sessions = columns["session_id"].tolist() if "session_id" in _names(columns) else [key.session_id for key in parsed]
    for key, uid, session_id in zip(parsed, uids, sessions, strict=True):
        if key.uid != uid:
            raise FieldError(f"{key}: field 'uid' is {uid!r}, but the key belongs to {key.uid!r}")
        if key.session_id != session_id:
            raise FieldError(f"{key}: field 'session_id' is {session_id}, but the key says {key.session_id}")


def columns_of_an_axis_are_aligned(meta: KVBatchMeta, columns: TensorDict) -> None:
    """All columns of an axis have one length a row; sequence = prompt + response."""
    known: dict[Axis, tuple[str, torch.Tensor]] = {}
    for name in _names(columns):
        column, axis = columns.get(name), catalogue_field(name).axis
        if axis is not Axis.NONE:
            first, lengths = known.setdefault(axis, (name, lengths_of(column)))
            _refuse_rows(meta, lengths_of(column), lengths, f"field {name!r} has", f"entries, but {first!r} has")
    if len(known) == 3:
        (_, prompts), (_, responses), (name, sequences) = known[Axis.PROMPT], known[Axis.RESPONSE], known[Axis.SEQUENCE]
        _refuse_rows(meta, sequences, prompts + responses, f"field {name!r} has", "entries, but prompt and response have")


def input_ids_are_prompt_then_response(meta: KVBatchMeta, columns: TensorDict) -> None:
    prompt_lens, sequence = lengths_of(columns["prompts"]), _Tokens(columns["input_ids"])
    ids, in_prompt = columns["input_ids"].values(), sequence.positions < prompt_lens[sequence.rows]
    parts = torch.empty_like(ids)
    parts[in_prompt], parts[~in_prompt] = columns["prompts"].values(), columns["responses"].values()
    for row, position, at in sequence.first(ids != parts):
        raise FieldError(
            f"{meta.keys[row]}: field 'input_ids' is {int(ids[at])} at position {position}, "
            f"but 'prompts' + 'responses' is {int(parts[at])}"
        )


def tags_spell_the_lengths(meta: KVBatchMeta, columns: TensorDict) -> None:
    """`prompt_len`, `response_len`, `seq_len` and `policy_len` of every tag that has them."""
    names = _names(columns)
    for tag, name in (("prompt_len", "prompts"), ("response_len", "responses"), ("seq_len", "input_ids")):
        if name in names:
            _refuse_tags(meta, tag, lengths_of(columns[name]), f"the length of {name!r}")
    if "response_mask" in names:
        _refuse_tags(meta, "policy_len", _row_sums(columns["response_mask"]), "'response_mask'.sum()")


# --- the mask ---------------------------------------------------------------------------------------------------------------------


def loss_mask_is_response_mask(meta: KVBatchMeta, columns: TensorDict) -> None:
    differs = columns["loss_mask"].values() != columns["response_mask"].values()
    for row, position, _ in _Tokens(columns["loss_mask"]).first(differs):
        raise FieldError(f"{meta.keys[row]}: fields 'loss_mask' and 'response_mask' differ at position {position}")


def only_actions_have_a_log_prob(meta: KVBatchMeta, columns: TensorDict) -> None:
    _refuse_outside_mask(meta, columns, "rollout_log_probs")


def only_actions_have_a_version(meta: KVBatchMeta, columns: TensorDict) -> None:
    versions, mask = columns["token_versions"].values(), columns["response_mask"].values()
    wrong = torch.where(mask, versions < 0, versions != -1)
    for row, position, at in _Tokens(columns["token_versions"]).first(wrong):
        allowed = "a version from 0" if bool(mask[at]) else "-1"
        raise FieldError(
            f"{meta.keys[row]}: field 'token_versions' is {int(versions[at])} at position {position}, "
            f"where 'response_mask' is {bool(mask[at])}; allowed: {allowed}"
        )


def log_probs_are_log_probs(meta: KVBatchMeta, columns: TensorDict) -> None:
    """rollout_log_probs, old_log_probs and ref_log_prob, those that are present."""
    mask = columns["response_mask"].values()
    for name in _present(columns, "rollout_log_probs", "old_log_probs", "ref_log_prob"):
        values = columns[name].values()
        wrong = mask & ~(torch.isfinite(values) & (values <= LOG_PROB_SLACK))
        for row, position, at in _Tokens(columns[name]).first(wrong):
            found = float(values[at])
            raise FieldError(f"{meta.keys[row]}: field {name!r} is {found} at position {position}; allowed: finite and at most 0")


def score_sits_on_the_last_action(meta: KVBatchMeta, columns: TensorDict) -> None:
    """rm_scores is 0 but on the last action of a row, where it is `reward_score` if that is present."""
    tokens, scores = _Tokens(columns["rm_scores"]), columns["rm_scores"].values()
    last = tokens.last_true(columns["response_mask"].values())
    for row, position, at in tokens.first((scores != 0) & (tokens.positions != last[tokens.rows])):
        raise FieldError(
            f"{meta.keys[row]}: field 'rm_scores' is {float(scores[at])} at position {position}; "
            f"the last action is at {int(last[row])}"
        )
    if "reward_score" in _names(columns):
        expected = torch.where(last >= 0, columns["reward_score"], torch.zeros_like(columns["reward_score"]))
        _refuse_rows(meta, _row_sums(columns["rm_scores"]), expected, "field 'rm_scores' sums to", "but 'reward_score' is")


def advantages_stay_inside_the_mask(meta: KVBatchMeta, columns: TensorDict) -> None:
    """`advantages` and `returns`, those that are present."""
    for name in _present(columns, "advantages", "returns"):
        values = columns[name].values()
        for row, position, at in _Tokens(columns[name]).first(~torch.isfinite(values)):
            raise FieldError(f"{meta.keys[row]}: field {name!r} is {float(values[at])} at position {position}; allowed: finite")
        _refuse_outside_mask(meta, columns, name)


def padding_rows_weigh_nothing(meta: KVBatchMeta, columns: TensorDict) -> None:
    """A row tagged `is_padding` has no action and no reward, so no loss, metric or count can see it."""
    for name in _present(columns, "response_mask", "rm_scores", "reward_score"):
        column = columns[name]
        sums = _row_sums(column.abs() if column.dtype != torch.bool else column) if is_ragged(column) else column.abs()
        for key, tag, total in zip(meta.keys, meta.tags, sums.tolist(), strict=True):
            if tag.get("is_padding") and total:
                raise FieldError(f"{key}: a padding row has {name!r} summing to {total}; allowed: 0")


# --- versions ---------------------------------------------------------------------------------------------------------------------


def versions_never_fall(meta: KVBatchMeta, columns: TensorDict) -> None:
    """Along the actions of a trajectory; and the first version of a session's trajectory is not below that of an earlier index."""
    tokens, mask = _Tokens(columns["token_versions"]), columns["response_mask"].values()
    versions, rows, positions = columns["token_versions"].values()[mask], tokens.rows[mask], tokens.positions[mask]
    falls = (rows[1:] == rows[:-1]) & (versions[1:] < versions[:-1])
    for at in falls.nonzero()[:1, 0].tolist():
        raise FieldError(
            f"{meta.keys[int(rows[at])]}: field 'token_versions' falls from {int(versions[at])} to {int(versions[at + 1])} "
            f"at position {int(positions[at + 1])}"
        )
    starts = torch.cat([rows.new_ones(1, dtype=torch.bool), rows[1:] != rows[:-1]])[: len(rows)]
    _refuse_falling_sessions(meta, dict(zip(rows[starts].tolist(), versions[starts].tolist(), strict=True)))


def tags_spell_the_versions(meta: KVBatchMeta, columns: TensorDict) -> None:
    tokens, mask = _Tokens(columns["token_versions"]), columns["response_mask"].values()
    versions, rows = columns["token_versions"].values()[mask].long(), tokens.rows[mask]
    dispatched = torch.tensor([int(tag.get("global_steps", 0)) for tag in meta.tags], device=versions.device)
    for tag, reduction in (("min_global_steps", "amin"), ("max_global_steps", "amax")):
        # include_self=False: rows without an action keep the dispatch version
        expected = dispatched.scatter_reduce(0, rows, versions, reduction, include_self=False)
        _refuse_tags(meta, tag, expected, "what 'token_versions' of the actions says (without any: the tag global_steps)")


# --- a batch against something else -----------------------------------------------------------------------------------------------


def parts_make_up_the_whole(whole: KVBatchMeta, parts: Sequence[KVBatchMeta]) -> None:
    """A reorder (one part), the mini-batches of a step or the shards of the ranks hold each row once, with its tags unchanged."""
    tags = dict(zip(whole.keys, whole.tags, strict=True))
    for key, tag in ((key, tag) for part in parts for key, tag in zip(part.keys, part.tags, strict=True)):
        if key not in tags:
            raise FieldError(f"{key}: in two parts of a batch, or not in the batch at all")
        if (expected := tags.pop(key)) != tag:
            raise FieldError(f"{key}: tag changed from {dict(expected)} to {dict(tag)} in a reorder")
    if tags:
        raise FieldError(f"{next(iter(tags))}: in no part of its batch; {len(tags)} of {len(whole)} rows are lost")


def groups_stay_together(parts: Sequence[KVBatchMeta]) -> None:
    """A mini-batch is a number of whole groups."""
    place: dict[str, int] = {}
    for number, part in enumerate(parts):
        for key, uid in zip(part.keys, part.uids, strict=True):
            if place.setdefault(uid, number) != number:
                raise FieldError(f"{key}: its group {uid!r} is split over parts {place[uid]} and {number}")


def data_parallel_follows_the_actor(*, world_size: int, sequence_parallel: int, data_parallel: int) -> None:
    """Logical actor DP = world size / sequence parallel; the rollout's parallelism has no say in it."""
    if data_parallel * sequence_parallel != world_size:
        raise FieldError(
            f"data parallel {data_parallel} x sequence parallel {sequence_parallel} = {data_parallel * sequence_parallel}, "
            f"but the actor has {world_size} ranks"
        )


def padding_and_back_is_the_identity(meta: KVBatchMeta, columns: TensorDict) -> None:
    """Not part of `check_batch`: it copies the batch twice, and a property test holds it for every dtype."""
    padded = pad_batch(columns)
    for name in _names(columns):
        column = columns.get(name)
        if isinstance(column, torch.Tensor) and is_ragged(column):
            back = unpad_field(padded, name, padded.batch[name])
            _refuse_rows(meta, lengths_of(back), lengths_of(column), f"padding and back gives field {name!r}", "entries, not")
            for row, position, _ in _Tokens(column).first(_differ(back.values(), column.values())):
                raise FieldError(f"{meta.keys[row]}: padding and back changes field {name!r} at position {position}")


def cleanup_leaves_nothing(meta: KVBatchMeta, remaining: Iterable[str]) -> None:
    """remaining: trajectory keys still visible in the partition after the batch was retired or cleared."""
    uids = set(meta.uids)
    for key in remaining:
        if TrajectoryKey.parse(key).uid in uids:
            raise FieldError(f"{key}: still in partition {meta.partition_id!r} after its group was cleaned up")


# --- helpers ----------------------------------------------------------------------------------------------------------------------


class _Tokens:
    """Row and position of every entry of a ragged column: rows, positions int64 [N]."""

    def __init__(self, column: torch.Tensor) -> None:
        lengths = lengths_of(column)
        self.num_rows = len(lengths)
        self.rows = torch.repeat_interleave(lengths)
        starts = lengths.cumsum(0) - lengths
        self.positions = torch.arange(len(self.rows), device=lengths.device) - starts[self.rows]

    def first(self, wrong: torch.Tensor) -> list[tuple[int, int, int]]:
        """Row, position and flat index of the first True entry; empty when there is none."""
        return [(int(self.rows[at]), int(self.positions[at]), at) for at in wrong.nonzero()[:1, 0].tolist()]

    def last_true(self, mask: torch.Tensor) -> torch.Tensor:
        """Position of the last True entry of each row, int64 [B]; -1 where there is none."""
        none = torch.full((self.num_rows,), -1, device=mask.device)
        return none.scatter_reduce(0, self.rows[mask], self.positions[mask], "amax")


def _names(columns: TensorDict) -> list[str]:
    """In the order of the columns, so that a message is the same at every run."""
    return list(map(str, columns.keys()))


def _present(columns: TensorDict, *names: str) -> list[str]:
    return [name for name in names if name in _names(columns)]


def _row_sums(column: torch.Tensor) -> torch.Tensor:
    """[B], int64 for a mask."""
    values = column.values()
    sums = torch.zeros(len(lengths_of(column)), dtype=torch.int64 if values.dtype == torch.bool else values.dtype)
    return sums.to(values.device).index_add(0, _Tokens(column).rows, values.to(sums.dtype))


def _differ(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Where two tensors differ; NaN equals NaN."""
    return (left != right) & ~((left != left) & (right != right))


def _refuse_rows(meta: KVBatchMeta, found: torch.Tensor, expected: torch.Tensor, says: str, but: str) -> None:
    for row in (found != expected).nonzero()[:1, 0].tolist():
        raise FieldError(f"{meta.keys[row]}: {says} {found[row].item()} {but} {expected[row].item()}")


def _refuse_tags(meta: KVBatchMeta, tag: str, expected: torch.Tensor, source: str) -> None:
    for key, tags, number in zip(meta.keys, meta.tags, expected.tolist(), strict=True):
        if tag in tags and tags[tag] != number:
            raise FieldError(f"{key}: tag {tag!r} is {tags[tag]}, but {source} is {number}")


def _refuse_outside_mask(meta: KVBatchMeta, columns: TensorDict, name: str) -> None:
    values, mask = columns[name].values(), columns["response_mask"].values()
    for row, position, at in _Tokens(columns[name]).first(~mask & (values != 0)):
        raise FieldError(
            f"{meta.keys[row]}: field {name!r} is {float(values[at])} at position {position}, "
            "where 'response_mask' is False; allowed: 0"
        )


def _refuse_falling_sessions(meta: KVBatchMeta, first_versions: dict[int, int]) -> None:
    newest: dict[tuple[str, int], tuple[TrajectoryKey, int]] = {}
    for key, version in sorted((TrajectoryKey.parse(meta.keys[row]), version) for row, version in first_versions.items()):
        earlier, floor = newest.setdefault((key.uid, key.session_id), (key, version))
        if version < floor:
            raise FieldError(f"{key}: its first token version is {version}, but the earlier {earlier} began with {floor}")
        newest[key.uid, key.session_id] = (key, version)


def _invariant(check: Callable[[KVBatchMeta, TensorDict], None], *needs: str) -> Invariant:
    return Invariant(check, frozenset(needs))


BATCH_INVARIANTS: tuple[Invariant, ...] = (
    # The first four come first: the others rely on lengths and dtypes.
    _invariant(one_row_a_key),
    _invariant(columns_fit_the_catalogue),
    _invariant(keys_restore_the_hierarchy),
    _invariant(columns_of_an_axis_are_aligned),
    _invariant(input_ids_are_prompt_then_response, "input_ids", "prompts", "responses"),
    _invariant(tags_spell_the_lengths),
    _invariant(loss_mask_is_response_mask, "loss_mask", "response_mask"),
    _invariant(only_actions_have_a_log_prob, "rollout_log_probs", "response_mask"),
    _invariant(only_actions_have_a_version, "token_versions", "response_mask"),
    _invariant(log_probs_are_log_probs, "response_mask"),
    _invariant(versions_never_fall, "token_versions", "response_mask"),
    _invariant(tags_spell_the_versions, "token_versions", "response_mask"),
    _invariant(score_sits_on_the_last_action, "rm_scores", "response_mask"),
    _invariant(advantages_stay_inside_the_mask, "response_mask"),
    _invariant(padding_rows_weigh_nothing),
)
