"""ragged -> padded -> ragged is the identity, for every dtype that torch has."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import FieldError
from asyncrl.protocol.ragged import (
    Side,
    from_values,
    is_ragged,
    lengths_of,
    mask_of,
    offsets_of,
    ragged,
    rows_of,
    to_padded,
    to_ragged,
)


def _is_storable(dtype: torch.dtype) -> bool:
    """Quantised types, and those below a byte, are names without a plain tensor behind them."""
    if dtype == torch.complex32:
        return True  # storable, but torch warns that it is experimental; the test ignores that
    try:
        torch.zeros(3, dtype=torch.uint8).to(dtype).clone()
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


DTYPES = sorted({entry for entry in vars(torch).values() if isinstance(entry, torch.dtype) and _is_storable(entry)}, key=str)
lengths = st.lists(st.integers(0, 5), min_size=1, max_size=6)
sides: st.SearchStrategy[Side] = st.sampled_from(["left", "right"])


def _rows(row_lengths: list[int], dtype: torch.dtype, *, inner: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """Rows whose bytes differ from place to place, padding included, so that a moved entry is seen."""
    size = torch.empty(0, dtype=dtype).element_size()
    rows = []
    for number, length in enumerate(row_lengths):
        shape = (length, *inner)
        count = int(torch.Size(shape).numel())
        if dtype == torch.bool:
            rows.append(torch.tensor([(number + at) % 2 == 0 for at in range(count)], dtype=dtype).reshape(shape))
        else:
            raw = torch.arange(1 + number, 1 + number + count * size, dtype=torch.int64).remainder(101).to(torch.uint8)
            rows.append(raw.view(dtype).reshape(shape))
    return rows


def _bytes(tensor: torch.Tensor) -> list[int]:
    return list(tensor.contiguous().flatten().view(torch.uint8).tolist())


def test_the_dtypes_include_the_odd_ones() -> None:
    odd = {
        torch.bfloat16,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint16,
        torch.uint64,
        torch.float16,
        torch.int8,
    }
    assert odd <= set(DTYPES)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(row_lengths=lengths, side=sides, extra=st.integers(0, 3))
def test_ragged_to_padded_and_back_is_the_identity(dtype: torch.dtype, row_lengths: list[int], side: Side, extra: int) -> None:
    rows = _rows(row_lengths, dtype)
    column = ragged(rows)
    padded = to_padded(column, side=side, length=max(row_lengths) + extra)
    back = to_ragged(padded, lengths_of(column), side=side)

    assert back.dtype == dtype
    assert lengths_of(back).tolist() == row_lengths
    assert [_bytes(row) for row in rows_of(back)] == [_bytes(row) for row in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool], ids=str)
@given(row_lengths=lengths, side=sides)
def test_inner_dimensions_survive(dtype: torch.dtype, row_lengths: list[int], side: Side) -> None:
    rows = _rows(row_lengths, dtype, inner=(3, 2))
    back = to_ragged(to_padded(ragged(rows), side=side), torch.tensor(row_lengths), side=side)
    assert [(tuple(row.shape), _bytes(row)) for row in rows_of(back)] == [(tuple(row.shape), _bytes(row)) for row in rows]


def test_padding_goes_to_the_side_that_was_asked() -> None:
    column = ragged([torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([3, 4, 5])])
    assert to_padded(column).tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5]]
    assert to_padded(column, side="left", padding=9, length=4).tolist() == [[9, 9, 1, 2], [9, 9, 9, 9], [9, 3, 4, 5]]


def test_all_rows_empty() -> None:
    column = ragged([torch.zeros(0), torch.zeros(0)])
    assert is_ragged(column)
    assert to_padded(column).shape == (2, 0)
    assert lengths_of(to_ragged(to_padded(column), torch.tensor([0, 0]))).tolist() == [0, 0]


def test_a_ragged_column_owns_its_memory() -> None:
    row = torch.tensor([1.0, 2.0])
    column = ragged([row])
    row[0] = 7.0
    assert column.values().tolist() == [1.0, 2.0]


def test_gradients_pass_through_padding() -> None:
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    to_padded(from_values(values, offsets_of(torch.tensor([1, 2])))).square().sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert values.grad.tolist() == [2.0, 4.0, 6.0]


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(FieldError, match="at least one row"):
        ragged([])
    with pytest.raises(FieldError, match=r"rows of one column have dtypes \['torch.float32', 'torch.int64'\]"):
        ragged([torch.tensor([1]), torch.tensor([1.0])])
    with pytest.raises(FieldError, match="row 1 has 3 entries but the padded length is 2"):
        to_padded(ragged([torch.ones(2), torch.ones(3)]), length=2)
    with pytest.raises(FieldError, match="row 0 has length 3 but the padded length is 2"):
        to_ragged(torch.ones(1, 2), torch.tensor([3]))


def test_mask_of() -> None:
    assert mask_of(torch.tensor([2, 0]), 3).tolist() == [[True, True, False], [False] * 3]
    assert mask_of(torch.tensor([2, 0]), 3, side="left").tolist() == [[False, True, True], [False] * 3]
