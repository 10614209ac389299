"""Values go in and come out unchanged, as copies, and no row keeps another's memory."""

import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from asyncrl.errors import DtypeChangeError, FieldError, TagCountError
from asyncrl.keys import GroupLease, SessionLease, StepLease
from asyncrl.ports import Json
from asyncrl.protocol.ragged import from_values, lengths_of, ragged, rows_of
from asyncrl.transfer_queue import TransferQueue
from asyncrl.transfer_queue.columns import Block, Gatherer, compact
from asyncrl.transfer_queue.encoding import ColumnValues, encode

OpenSession = Callable[..., Awaitable[SessionLease]]

ALL_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTIZED = [dtype for dtype in ALL_DTYPES if str(dtype).startswith(("torch.qint", "torch.quint"))]
DTYPES = [dtype for dtype in ALL_DTYPES if dtype not in QUANTIZED]


def bits(tensor: torch.Tensor) -> list[int]:
    """The memory of a tensor: also compares what torch cannot, such as float8 and NaN."""
    numbers: list[int] = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    return numbers


def some(dtype: torch.dtype, count: int) -> torch.Tensor:
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype)


def test_what_this_torch_has_is_what_the_tests_below_cover() -> None:
    """A torch without one of these would make them say less than they seem to."""
    expected = {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.chalf, torch.cfloat, torch.cdouble),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    }
    assert expected <= set(DTYPES)


@pytest.mark.parametrize("is_stacked", [False, True], ids=["ragged", "stacked"])
async def test_every_dtype_round_trips(is_stacked: bool, house: Any, open_session: OpenSession) -> None:
    """Through the journal too, where there is one; zero-length rows among them."""
    lease, keys = await open_session(), ["a_0_0", "a_0_1", "a_0_2"]
    columns = {str(dtype): [some(dtype, length) for length in ((1, 1, 1) if is_stacked else (0, 1, 5))] for dtype in DTYPES}
    if is_stacked:
        columns = {name: [row[0] for row in rows] for name, rows in columns.items()}
    await house.queue.kv_batch_put(keys, partition_id="train", lease=lease, fields=columns)
    for _ in range(2):
        got = await house.queue.kv_batch_get(keys, partition_id="train", fields=list(columns))
        for dtype in DTYPES:
            column, values = got.get(str(dtype)), columns[str(dtype)]
            assert column.dtype is dtype
            assert (column.shape == (3,)) if is_stacked else (lengths_of(column).tolist() == [0, 1, 5])
            assert bits(column if is_stacked else column.values()) == [bit for value in values for bit in bits(value)], dtype
        if house.is_durable:
            await house.reopen()


async def test_every_dtype_round_trips_in_a_turn(house: Any, open_session: OpenSession) -> None:
    values = {str(dtype): some(dtype, 3) for dtype in DTYPES}
    await house.queue.put_turn(await open_session(), 0, {**values, "none": torch.zeros(0)})
    if house.is_durable:
        await house.reopen()
    (turn,) = await house.queue.kv_turns("a", 0)
    for dtype in DTYPES:
        assert turn[str(dtype)].dtype is dtype
        assert bits(turn[str(dtype)].values()) == bits(values[str(dtype)]), dtype
    assert lengths_of(turn["none"]).tolist() == [0]


with warnings.catch_warnings(action="ignore"):  # torch will have none of them one day
    QUANTIZED_ROW = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
NO_VALUES: dict[str, tuple[Any, str]] = {
    "quantized row": ([QUANTIZED_ROW], "torch.quint8 has a scale beside its values"),
    "quantized batch": (QUANTIZED_ROW.view(1, 3), "torch.quint8 has a scale beside its values"),
    "sparse row": ([torch.ones(3).to_sparse()], ""),
    "sparse batch": (torch.ones(1, 3).to_sparse(), ""),
    "no data": ([torch.ones(3, device="meta")], "no data"),
    "jagged row": ([ragged([torch.ones(3)])], ""),
    "text": ("a", "a str is one value; give one a key"),
    "bytes": (b"a", "a bytes is one value"),
    "dict": ({"a": 1}, "a dict is one value"),
    "nothing": (None, "a NoneType is one value"),
    "number": (3, "a int is one value"),
    "tensor of no axis": (torch.tensor(1.0), "a Tensor is one value"),
    "array of no axis": (np.array(1.0), "a ndarray is one value"),
    "dates": (np.array(["2026-01-01"], dtype="datetime64[D]"), "date is not a JSON value"),
}


@pytest.mark.parametrize("name", NO_VALUES)
async def test_what_is_no_plain_column_is_refused_by_field_and_key(
    name: str, queue: TransferQueue, open_session: OpenSession
) -> None:
    lease = await open_session()
    values, text = NO_VALUES[name]
    with pytest.raises(FieldError, match=f"field 'x' of key 'a_0_0' cannot be stored: .*{text}"):
        await queue.kv_batch_put(["a_0_0"], partition_id="train", lease=lease, fields={"x": values})
    assert queue.stats()["keys"] == 0


ARRAYS: dict[str, np.ndarray] = {
    "texts": np.array(["a", "bc"]),
    "objects": np.array([{"a": 1}, [2]], dtype=object),
    "other byte order": np.array([1.5, -2.0], dtype=">f4"),
    "backwards": np.arange(4)[::-2],
    "unsigned": np.array([1, 65535], dtype=np.uint16),
}


@pytest.mark.parametrize("name", ARRAYS)
async def test_an_array_comes_back_as_what_it_says(name: str, queue: TransferQueue, open_session: OpenSession) -> None:
    lease, array = await open_session(), ARRAYS[name]
    await queue.kv_batch_put(["a_0_0", "a_0_1"], partition_id="train", lease=lease, fields={"x": array})
    got = (await queue.kv_batch_get(["a_0_0", "a_0_1"], partition_id="train", fields=["x"])).get("x")
    assert got.tolist() == array.tolist()


VIEWS = {
    "plain": torch.tensor([1.0, 2.0]),
    "holes": torch.tensor([1.0, 0.0, 2.0, 0.0])[::2],
    "negated": torch.complex(torch.zeros(2), torch.tensor([-1.0, -2.0])).conj().imag,
    "needs a gradient": torch.tensor([1.0, 2.0], requires_grad=True),
}


@pytest.mark.parametrize("row", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("count", [1, 2])
async def test_a_row_is_stored_as_its_values_say(row: torch.Tensor, count: int) -> None:
    """A tensor may be a view whose memory is not its values; single rows go a way of their own."""
    keys = ["a_0_0", "a_0_1"][:count]
    block = encode("x", [row] * count, keys, step=None)
    column = Gatherer().gather([(block, count - 1)])
    assert isinstance(column, torch.Tensor)
    assert rows_of(column)[0].tolist() == [1.0, 2.0]


async def test_rows_with_more_axes_keep_them(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    positions = [torch.arange(12).view(4, 3), torch.arange(6).view(2, 3)]
    await queue.kv_batch_put(
        ["a_0_0", "a_0_1"], partition_id="train", lease=lease, fields={"position_ids": positions, "y": torch.ones(2, 5)}
    )
    got = await queue.kv_batch_get(["a_0_1", "a_0_0"], partition_id="train", fields=["position_ids", "y"])
    assert torch.equal(got["position_ids"].values(), torch.cat(positions[::-1]))
    assert got["y"].shape == (2, 5)


async def test_a_list_means_what_the_catalogue_says(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    fields = {
        "prompts": [1, 2, 3],
        "response_mask": [True, False],
        "reward_score": 0.5,
        "session_id": 0,
        "uid": "a",
        "extra_fields": {"k": [1]},
    }
    await queue.kv_put("a_0_0", partition_id="train", lease=lease, fields=fields)
    got = await queue.kv_batch_get(["a_0_0"], partition_id="train", fields=list(fields))
    assert got["prompts"].values().tolist() == [1, 2, 3]
    assert got["response_mask"].dtype is torch.bool
    assert got["reward_score"].dtype is torch.float32
    assert got["session_id"].dtype is torch.int64
    assert got.get("uid").tolist() == ["a"]
    assert got.get("extra_fields").tolist() == [{"k": [1]}]


async def test_a_dense_tensor_for_a_ragged_field_is_refused(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    with pytest.raises(FieldError, match=r"'responses' of key 'a_0_0' came padded, shape \[1, 4\]"):
        await queue.kv_batch_put(["a_0_0"], partition_id="train", lease=lease, fields={"responses": torch.zeros(1, 4)})


async def test_what_a_get_returns_can_be_put_back(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    keys = ["a_0_0", "a_0_1"]
    fields = TensorDict(
        {
            "responses": ragged([torch.arange(3), torch.arange(0)]),
            "num_turns": torch.tensor([1, 2]),
            "extra_fields": NonTensorStack({"a": 1}, [2, 3]),
        },
        batch_size=[2],
    )
    await queue.kv_batch_put(keys, partition_id="train", lease=lease, fields=fields)
    for _ in range(2):
        got = await queue.kv_batch_get(keys, partition_id="train", fields=["responses", "num_turns", "extra_fields"])
        assert [row.tolist() for row in rows_of(got["responses"])] == [[0, 1, 2], []]
        assert got["num_turns"].tolist() == [1, 2]
        assert got.get("extra_fields").tolist() == [{"a": 1}, [2, 3]]
        await queue.kv_batch_put(keys, partition_id="train", lease=lease, fields=got)


async def test_equal_objects_come_back_one_a_row(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    keys = ["a_0_0", "a_0_1"]
    fields = TensorDict({"uid": NonTensorStack("a", "a")}, batch_size=[2])
    await queue.kv_batch_put(keys, partition_id="train", lease=lease, fields=fields)
    assert (await queue.kv_batch_get(keys, partition_id="train", fields=["uid"])).get("uid").tolist() == ["a", "a"]


def test_a_transposed_column_is_taken_by_its_rows() -> None:
    """Even where its memory looks like that of an ordinary one: entries of one number, and one row."""
    column = ragged([torch.arange(4).view(1, 4)]).transpose(1, 2)
    block = encode("x", column, ["a_0_0"], step=None)
    assert (block.schema.shape, block.bounds, block.values.tolist()) == ((1,), [0, 32], bits(torch.arange(4)))
    narrow = ragged([torch.ones(3, 1), torch.ones(2, 1)]).transpose(1, 2)
    with pytest.raises(DtypeChangeError, match=r"field 'x' of key 'a_0_1' is torch.float32 \[1, 2\], beside ragged float32\[3\]"):
        encode("x", narrow, ["a_0_0", "a_0_1"], step=None)


async def test_a_view_with_holes_is_stored_without_them(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    holes = torch.nested.narrow(
        torch.arange(12).view(3, 4), 1, torch.tensor([0, 1, 2]), torch.tensor([2, 0, 2]), layout=torch.jagged
    )
    await queue.kv_batch_put([f"a_0_{i}" for i in range(3)], partition_id="train", lease=lease, fields={"responses": holes})
    got = await queue.kv_batch_get(["a_0_0", "a_0_1", "a_0_2"], partition_id="train", fields=["responses"])
    assert [row.tolist() for row in rows_of(got["responses"])] == [[0, 1], [], [10, 11]]


async def test_columns_of_equal_lengths_share_offsets(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    fields = {"old_log_probs": [torch.ones(2), torch.ones(3)], "rollout_log_probs": [torch.ones(2), torch.ones(3)]}
    await queue.kv_batch_put(["a_0_0", "a_0_1"], partition_id="train", lease=lease, fields=fields)
    got = await queue.kv_batch_get(["a_0_0", "a_0_1"], partition_id="train", fields=list(fields))
    assert (got["old_log_probs"] - got["rollout_log_probs"]).values().tolist() == [0.0] * 5


async def test_changing_what_was_put_or_got_changes_nothing(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    responses, extra = torch.arange(3), {"list": [1]}
    await queue.kv_put("a_0_0", partition_id="train", lease=lease, fields={"responses": responses, "extra_fields": extra})
    responses.add_(100)
    extra["list"].append(2)
    for _ in range(2):
        got = await queue.kv_batch_get(["a_0_0"], partition_id="train", fields=["responses", "extra_fields"])
        assert got["responses"].values().tolist() == [0, 1, 2]
        assert got.get("extra_fields").tolist() == [{"list": [1]}]
        got["responses"].values().zero_()
        got.get("extra_fields").tolist()[0]["list"].clear()


@pytest.mark.parametrize("layout", ["jagged", "stacked", "array", "rows", "one row"])
async def test_changing_a_batch_after_its_put_changes_nothing(layout: str, queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    flat = torch.arange(4)
    values: dict[str, ColumnValues] = {
        "jagged": from_values(flat, torch.tensor([0, 2, 4])),
        "stacked": flat.view(2, 2),
        "array": flat.view(2, 2).numpy(),
        "rows": [flat[:2], flat[2:]],
        "one row": [flat],
    }
    keys = ["a_0_0"] if layout == "one row" else ["a_0_0", "a_0_1"]
    await queue.kv_batch_put(keys, partition_id="train", lease=lease, fields={"x": values[layout]})
    flat.zero_()
    column = (await queue.kv_batch_get(keys, partition_id="train", fields=["x"]))["x"]
    assert (column.values() if column.is_nested else column).flatten().tolist() == [0, 1, 2, 3]


JSON_VALUES: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(JSON_VALUES, min_size=1, max_size=4))
def test_json_objects_come_back_equal(values: list[Json]) -> None:
    block = encode("anything", values, [f"a_0_{i}" for i in range(len(values))], step=None)
    if block.schema.dtype is None:
        back = Gatherer().gather([(block, row) for row in range(len(values))])
        assert back.tolist() == values


@pytest.mark.parametrize(
    "value",
    [{1, 2}, {1: "a"}, object(), b"bytes", 2**70, "\ud800", np.float64(1.0), {"deep": [set()]}],
    ids=["set", "int key", "object", "bytes", "large int", "surrogate", "numpy scalar", "nested set"],
)
async def test_what_would_not_come_back_equal_is_refused(value: Json, queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    with pytest.raises(FieldError, match="field 'extra_fields' of key 'a_0_0' cannot be stored"):
        await queue.kv_put("a_0_0", partition_id="train", lease=lease, fields={"extra_fields": value})
    assert queue.stats()["keys"] == 0


async def test_rows_of_two_dtypes_in_one_put_are_refused(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    rows = [torch.zeros(1), torch.zeros(1, dtype=torch.float64)]
    with pytest.raises(DtypeChangeError, match=r"field 'x' of key 'a_0_1' is torch.float64"):
        await queue.kv_batch_put(["a_0_0", "a_0_1"], partition_id="train", lease=lease, fields={"x": rows})


async def test_a_number_for_a_ragged_field_is_refused(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    with pytest.raises(FieldError, match="field 'responses' of key 'a_0_0' is one number"):
        await queue.kv_put("a_0_0", partition_id="train", lease=lease, fields={"responses": 3})


async def test_wrong_number_of_values_names_field_and_key(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    with pytest.raises(TagCountError, match=r"field 'x' has 1 values for 2 keys: none for 'a_0_1'"):
        await queue.kv_batch_put(["a_0_0", "a_0_1"], partition_id="train", lease=lease, fields={"x": [torch.zeros(1)]})
    assert queue.stats()["keys"] == 0


# --- memory


async def test_one_row_does_not_pin_its_batch(queue: TransferQueue, open_session: OpenSession) -> None:
    lease = await open_session()
    keys = [f"a_0_{i}" for i in range(64)]
    await queue.kv_batch_put(keys, partition_id="train", lease=lease, fields={"x": [torch.full((1000,), i) for i in range(64)]})
    whole = queue.stats()["bytes"]
    await queue.kv_clear([key for key in keys if key != "a_0_37"], partition_id="train")
    assert queue.stats()["bytes"] == whole / 64
    got = await queue.kv_batch_get(["a_0_37"], partition_id="train", fields=["x"])
    assert got["x"].values().tolist() == [37] * 1000


@given(data=st.data(), lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12))
async def test_held_bytes_are_at_most_twice_the_live_ones(data: st.DataObject, lengths: list[int]) -> None:
    # A queue of its own: fixtures are shared by all examples of a test.
    queue, lease = TransferQueue(), SessionLease(uid="a", session_id=0)
    await queue.open_lease(GroupLease(uid="a"))
    await queue.open_lease(lease)
    alive = {f"a_0_{i}": length for i, length in enumerate(lengths)}
    await queue.kv_batch_put(list(alive), partition_id="p", lease=lease, fields={"x": [torch.arange(length) for length in lengths]})
    while alive:
        gone = data.draw(st.lists(st.sampled_from(sorted(alive)), min_size=1, unique=True))
        await queue.kv_clear(gone, partition_id="p")
        for key in gone:
            del alive[key]
        stats = queue.stats()
        assert stats["live_bytes"] == 8 * sum(alive.values())
        assert stats["bytes"] <= 2 * stats["live_bytes"]
        if alive:
            got = await queue.kv_batch_get(list(alive), partition_id="p", fields=["x"])
            assert [row.tolist() for row in rows_of(got["x"])] == [list(range(length)) for length in alive.values()]
    assert queue.stats()["bytes"] == 0


async def test_overwriting_a_column_leaves_no_old_bytes(queue: TransferQueue, open_session: OpenSession) -> None:
    await open_session()
    lease = await open_session(session_id=1)
    await queue.kv_put("a_1_0", partition_id="train", lease=lease, fields={"responses": [1]})
    step = StepLease(step=1)
    await queue.open_lease(step)
    for round_ in range(50):
        await queue.kv_put("a_1_0", partition_id="train", lease=step, fields={"advantages": [float(round_)] * 10})
    assert queue.stats()["bytes"] == queue.stats()["live_bytes"] == 8 + 40


def test_compact_keeps_rows_in_order() -> None:
    block = encode("x", [torch.arange(2), torch.arange(0), torch.arange(3)], ["k0", "k1", "k2"], step=4)
    block.release(0)
    smaller: Block = compact(block)
    assert (smaller.owners, smaller.bounds, smaller.step) == (["k1", "k2"], [0, 0, 24], 4)
