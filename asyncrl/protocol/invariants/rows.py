"""Invariants of rows, keys, tags and lengths, and of the ids that a forward pass reads."""

import torch
from tensordict import TensorDict

from asyncrl.errors import FieldError
from asyncrl.fields import SEVERAL_AXES, Axis
from asyncrl.fields import field as catalogue_field
from asyncrl.keys import TrajectoryKey
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.invariants.tokens import Tokens, names_of, refuse_rows, refuse_tags, row_sums
from asyncrl.protocol.position_ids import ragged_text_position_ids
from asyncrl.protocol.ragged import is_ragged, lengths_of, rows_of, values_of

_LENGTH_TAGS = {Axis.PROMPT: "prompt_len", Axis.RESPONSE: "response_len", Axis.SEQUENCE: "seq_len"}


def one_row_a_key(meta: KVBatchMeta, columns: TensorDict) -> None:
    if columns.batch_size[:1] != torch.Size([len(meta)]):
        raise FieldError(
            f"{len(meta)} keys from {meta.keys[0] if len(meta) else 'none'!r} on, "
            f"but the columns have batch size {list(columns.batch_size)}"
        )


def columns_fit_the_catalogue(meta: KVBatchMeta, columns: TensorDict) -> None:
    """A known name, the catalogue's dtype, ragged exactly where the field has an axis, and one number an entry."""
    for name in names_of(columns):
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
        if column.ndim > (3 if name in SEVERAL_AXES else 2):
            raise FieldError(f"field {name!r} has entries of shape {list(column.shape[2:])}; allowed: one number an entry")


def keys_restore_the_hierarchy(meta: KVBatchMeta, columns: TensorDict) -> None:
    """Every key spells (uid, session, index), and the columns `uid` and `session_id` agree with it."""
    parsed = [TrajectoryKey.parse(key) for key in meta.keys]
    uids = columns.get("uid").tolist() if "uid" in names_of(columns) else [key.uid for key in parsed]
    sessions = columns["session_id"].tolist() if "session_id" in names_of(columns) else [key.session_id for key in parsed]
    for key, uid, session_id in zip(parsed, uids, sessions, strict=True):
        if key.uid != uid:
            raise FieldError(f"{key}: field 'uid' is {uid!r}, but the key belongs to {key.uid!r}")
        if key.session_id != session_id:
            raise FieldError(f"{key}: field 'session_id' is {session_id}, but the key says {key.session_id}")


def columns_of_an_axis_are_aligned(meta: KVBatchMeta, columns: TensorDict) -> None:
    """All columns of an axis have one length a row; sequence = prompt + response."""
    known = _first_of_each_axis(columns)
    for name in names_of(columns):
        axis = catalogue_field(name).axis
        if axis is not Axis.NONE and name != known[axis]:
            lengths, first = lengths_of(columns[name]), known[axis]
            refuse_rows(meta, lengths, lengths_of(columns[first]), f"field {name!r} has", f"entries, but {first!r} has")
    if len(known) == 3:
        prompts, responses, sequences = (lengths_of(columns[known[axis]]) for axis in _LENGTH_TAGS)
        name = known[Axis.SEQUENCE]
        refuse_rows(meta, sequences, prompts + responses, f"field {name!r} has", "entries, but prompt and response have")


def tags_spell_the_lengths(meta: KVBatchMeta, columns: TensorDict) -> None:
    """`prompt_len`, `response_len` and `seq_len` of every tag that has them, whichever column of the axis is there."""
    for axis, name in _first_of_each_axis(columns).items():
        refuse_tags(meta, _LENGTH_TAGS[axis], lengths_of(columns[name]), f"the length of {name!r}")


def tags_spell_the_policy_length(meta: KVBatchMeta, columns: TensorDict) -> None:
    """`policy_len` of every tag that has it: actions, observations not counted."""
    refuse_tags(meta, "policy_len", row_sums(columns["response_mask"]), "'response_mask'.sum()")


def input_ids_are_prompt_then_response(meta: KVBatchMeta, columns: TensorDict) -> None:
    ids, sequence = values_of(columns["input_ids"]), Tokens(columns["input_ids"])
    pairs = zip(rows_of(columns["prompts"]), rows_of(columns["responses"]), strict=True)
    parts = torch.cat([part for pair in pairs for part in pair])
    for row, position, at in sequence.first(ids != parts):
        raise FieldError(
            f"{meta.keys[row]}: field 'input_ids' is {int(ids[at])} at position {position}, "
            f"but 'prompts' + 'responses' is {int(parts[at])}"
        )


def position_ids_count_up(meta: KVBatchMeta, columns: TensorDict) -> None:
    """Text: 0, 1, 2, ... in every row. Several axes: never negative, since what they say of an image is the model's own affair."""
    column = columns["position_ids"]
    values, tokens = values_of(column), Tokens(column)
    if values.ndim == 1:
        for row, position, at in tokens.first(values != values_of(ragged_text_position_ids(lengths_of(column)))):
            raise FieldError(
                f"{meta.keys[row]}: field 'position_ids' is {int(values[at])} at position {position}; allowed: {position}, "
                "text counts up from 0"
            )
    else:
        for row, position, at in tokens.first((values < 0).any(1)):
            raise FieldError(
                f"{meta.keys[row]}: field 'position_ids' is {values[at].tolist()} at position {position}; allowed: 0 and up"
            )


def _first_of_each_axis(columns: TensorDict) -> dict[Axis, str]:
    """The column that speaks for its axis: the first in the order of the columns."""
    known: dict[Axis, str] = {}
    for name in names_of(columns):
        axis = catalogue_field(name).axis
        if axis is not Axis.NONE:
            known.setdefault(axis, name)
    return known
