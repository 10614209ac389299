"""ragged -> padded -> ragged through `pad_batch`, for every field of the catalogue; and the four lengths are four things."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from asyncrl.errors import FieldError
from asyncrl.fields import CATALOGUE, Axis, Field
from asyncrl.keys import TRAIN
from asyncrl.protocol.batch_meta import KVBatchMeta
from asyncrl.protocol.data_proto import pad_batch, unpad_field
from asyncrl.protocol.invariants import check_batch, padding_and_back_is_the_identity
from asyncrl.protocol.position_ids import ragged_text_position_ids
from asyncrl.protocol.ragged import is_ragged, lengths_of, mask_of, offsets_of, ragged, rows_of

Lengths = list[tuple[int, int]]
"""(prompt_len, response_len) of each row."""

lengths: st.SearchStrategy[Lengths] = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=5)
EDGES: list[Lengths] = [[(1, 0)], [(1, 1)], [(3, 0), (2, 0)], [(2, 1), (1, 1)], [(0, 1)], [(0, 0)], [(1, 0), (4, 5), (2, 1)]]
"""No response at all, one token, no prompt, nothing, and a row of each beside long ones."""

PER_AXIS = {Axis.PROMPT: "prompts", Axis.RESPONSE: "returns", Axis.SEQUENCE: "input_ids"}
DTYPES = [
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
]  # fmt: skip


def _length(axis: Axis, prompt_len: int, response_len: int) -> int:
    return {Axis.PROMPT: prompt_len, Axis.RESPONSE: response_len, Axis.SEQUENCE: prompt_len + response_len, Axis.NONE: 1}[axis]


def _values(count: int, dtype: torch.dtype, start: int) -> torch.Tensor:
    """No entry is 0, so that one that is lost to padding is seen; bits, since not every dtype can be counted in."""
    if dtype == torch.bool:
        return torch.ones(count, dtype=torch.bool)
    size = torch.empty(0, dtype=dtype).element_size()
    return (torch.arange(start, start + count * size) % 100 + 1).to(torch.uint8).view(dtype)


def _column(entry: Field, rows: Lengths, dtype: torch.dtype | None) -> torch.Tensor | NonTensorStack:
    if not entry.is_tensor:
        return NonTensorStack(*({"row": number, "list": [number] * 2} for number in range(len(rows))))
    dtype = dtype or getattr(torch, entry.dtype)
    cells = [_values(_length(entry.axis, *pair), dtype, 7 * number) for number, pair in enumerate(rows)]
    return torch.stack([cell[0] for cell in cells]) if entry.axis is Axis.NONE else ragged(cells)


def _bits(tensor: torch.Tensor) -> list[int]:
    return list(tensor.contiguous().flatten().view(torch.uint8).tolist())


def _round_trip(entry: Field, rows: Lengths, dtype: torch.dtype | None = None) -> None:
    prompts, responses = ([_values(pair[which], torch.int64, 0) for pair in rows] for which in (0, 1))
    columns = TensorDict({"prompts": ragged(prompts), "responses": ragged(responses)}, batch_size=[len(rows)])
    column = _column(entry, rows, dtype)
    columns[entry.name] = column
    data = pad_batch(columns)
    if not isinstance(column, torch.Tensor):
        assert data.non_tensor_batch[entry.name].tolist() == columns.get(entry.name).tolist()
        return
    back = unpad_field(data, entry.name, data.batch[entry.name])
    assert isinstance(back, torch.Tensor)
    assert back.dtype == column.dtype
    assert is_ragged(back) == is_ragged(column) == (entry.axis is not Axis.NONE)
    if is_ragged(column):
        assert lengths_of(back).tolist() == [_length(entry.axis, *pair) for pair in rows]
        assert _bits(torch.cat(rows_of(back))) == _bits(torch.cat(rows_of(column)))
    else:
        assert _bits(back) == _bits(column)


@pytest.mark.parametrize("name", CATALOGUE)
@settings(max_examples=25)
@given(rows=lengths)
def test_every_field_survives_padding_and_back(name: str, rows: Lengths) -> None:
    _round_trip(CATALOGUE[name], rows)


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("rows", EDGES, ids=str)
def test_every_field_survives_with_empty_and_one_token_rows(name: str, rows: Lengths) -> None:
    _round_trip(CATALOGUE[name], rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", PER_AXIS)
@settings(max_examples=25)
@given(rows=lengths)
def test_every_dtype_survives_on_every_axis(dtype: torch.dtype, axis: Axis, rows: Lengths) -> None:
    _round_trip(CATALOGUE[PER_AXIS[axis]], rows, dtype)


@pytest.mark.parametrize("num_axes", [3, 4])
@given(rows=lengths)
def test_position_ids_of_several_axes_survive(num_axes: int, rows: Lengths) -> None:
    cells = [torch.arange(1, 1 + (p + r) * num_axes).reshape(p + r, num_axes) for p, r in rows]
    columns = TensorDict(
        {"prompts": ragged([torch.ones(p, dtype=torch.int64) for p, _ in rows]), "position_ids": ragged(cells)},
        batch_size=[len(rows)],
    )
    data = pad_batch(columns)
    longest = max(p for p, _ in rows) + max(r for _, r in rows)
    assert data.batch["position_ids"].shape == (len(rows), num_axes, longest)
    back = unpad_field(data, "position_ids", data.batch["position_ids"])
    assert [row.tolist() for row in rows_of(back)] == [row.tolist() for row in cells]


def test_a_ragged_attention_mask_has_no_padding_to_speak_of() -> None:
    columns = TensorDict({"prompts": ragged([torch.ones(2, dtype=torch.int64)])}, batch_size=[1])
    columns["attention_mask"] = ragged([torch.tensor([True, False, True])])
    with pytest.raises(FieldError, match="'attention_mask' is False at entry 1, but ragged rows have no padding"):
        pad_batch(columns)


# --- the four lengths -------------------------------------------------------------------------------------------------------------

MASK = [1, 1, 0, 0, 0, 1, 1]
"""Two sampled tokens, a tool's answer of three, two sampled tokens."""
FOUR = {"prompt_len": 3, "response_len": 7, "seq_len": 10, "policy_len": 4}


def _agent_row() -> tuple[KVBatchMeta, TensorDict]:
    """One trajectory with observation tokens in the middle: no two of its four lengths are equal."""
    mask = torch.tensor(MASK, dtype=torch.bool)
    prompt, response = torch.arange(10, 13), torch.arange(20, 27)
    columns = TensorDict(
        {
            "prompts": ragged([prompt]),
            "responses": ragged([response]),
            "input_ids": ragged([torch.cat([prompt, response])]),
            "position_ids": ragged_text_position_ids(torch.tensor([10])),
            "response_mask": ragged([mask]),
            "loss_mask": ragged([mask]),
            "rollout_log_probs": ragged([-mask.float()]),
            "token_versions": ragged([torch.where(mask, 0, -1).int()]),
        },
        batch_size=[1],
    )
    return KVBatchMeta(partition_id=TRAIN, keys=("u_0_0",), tags=(FOUR,)), columns


def test_the_four_lengths_are_each_what_they_say() -> None:
    meta, columns = _agent_row()
    check_batch(meta, columns)
    padding_and_back_is_the_identity(meta, columns)
    data = pad_batch(columns)
    assert int(data.batch["prompt_lens"]) == FOUR["prompt_len"]
    assert int(data.batch["response_lens"]) == FOUR["response_len"] == data.batch["responses"].shape[1]
    assert int(data.batch["attention_mask"].sum()) == FOUR["seq_len"] == data.batch["input_ids"].shape[1]
    assert int(data.batch["response_mask"].sum()) == FOUR["policy_len"]


def test_observations_keep_their_place_between_actions() -> None:
    """Beside a longer row, too: the mask says the same tokens are actions before, in and after the padded layout."""
    _, columns = _agent_row()
    long = torch.ones(9, dtype=torch.bool)
    both = TensorDict(
        {
            "prompts": ragged([columns["prompts"].values(), torch.arange(1)]),
            "responses": ragged([columns["responses"].values(), torch.arange(9)]),
            "response_mask": ragged([columns["response_mask"].values(), long]),
        },
        batch_size=[2],
    )
    data = pad_batch(both)
    assert data.batch["response_mask"].int().tolist() == [[*MASK, 0, 0], [1] * 9]
    assert data.batch["responses"][0][data.batch["response_mask"][0]].tolist() == [20, 21, 25, 26]
    assert mask_of(data.batch["response_lens"], 9).sum(1).tolist() == [7, 9], "the container is longer than what was sampled"


@pytest.mark.parametrize(("tag", "other"), [*itertools.permutations(FOUR, 2)])
def test_no_length_passes_for_another(tag: str, other: str) -> None:
    meta, columns = _agent_row()
    confused = KVBatchMeta(partition_id=TRAIN, keys=meta.keys, tags=({**FOUR, tag: FOUR[other]},))
    with pytest.raises(FieldError, match=f"u_0_0: tag '{tag}' is {FOUR[other]}, .* {FOUR[tag]}"):
        check_batch(confused, columns)


@given(rows=lengths, data=st.data())
def test_lengths_add_up_for_any_mask(rows: Lengths, data: st.DataObject) -> None:
    masks = [torch.tensor(data.draw(st.lists(st.booleans(), min_size=r, max_size=r)), dtype=torch.bool) for _, r in rows]
    tags = tuple(
        {"prompt_len": p, "response_len": r, "seq_len": p + r, "policy_len": int(mask.sum())}
        for (p, r), mask in zip(rows, masks, strict=True)
    )
    meta = KVBatchMeta(partition_id=TRAIN, keys=tuple(f"u_{number}_0" for number in range(len(rows))), tags=tags)
    columns = TensorDict(
        {
            "prompts": ragged([torch.ones(p, dtype=torch.int64) for p, _ in rows]),
            "responses": ragged([torch.ones(r, dtype=torch.int64) for _, r in rows]),
            "input_ids": ragged([torch.ones(p + r, dtype=torch.int64) for p, r in rows]),
            "response_mask": ragged(masks),
        },
        batch_size=[len(rows)],
    )
    check_batch(meta, columns)
    padded = pad_batch(columns).batch
    for tag, found in (
        ("prompt_len", padded["prompt_lens"]),
        ("response_len", padded["response_lens"]),
        ("seq_len", padded["attention_mask"].sum(1)),
        ("policy_len", padded["response_mask"].sum(1)),
    ):
        assert found.tolist() == [number[tag] for number in tags]
    assert offsets_of(padded["response_lens"]).tolist()[-1] == sum(r for _, r in rows)
