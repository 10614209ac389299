"""Frames: any JSON value there and back, any cut of the stream, nothing else accepted."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rewards import frames

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(values=st.lists(JSON_VALUES, max_size=4), sizes=st.lists(st.integers(1, 9), min_size=1))
def test_any_values_survive_any_cut_of_the_stream(values: list[object], sizes: list[int]) -> None:
    stream = b"".join(frames.encode(value) for value in values)
    reader, seen, at, turn = frames.FrameReader(), [], 0, 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        seen += [frames.decode(body) for body in reader.feed(stream[at : at + size])]
        at, turn = at + size, turn + 1
    assert seen == values


def test_what_datasets_hold_survives() -> None:
    row = {"big": 2**80, "lone": "\ud800", "nan": float("nan"), "nul": "\0"}
    back = frames.decode(frames.encode(row)[frames.LENGTH_BYTES :])
    assert math.isnan(back.pop("nan"))
    assert back == {"big": 2**80, "lone": "\ud800", "nul": "\0"}


def test_numpy_scalars_become_plain_numbers() -> None:
    back = frames.decode(frames.encode([np.float32(0.5), np.int64(3), np.bool_(True), np.array(2)])[frames.LENGTH_BYTES :])
    assert json.dumps(back) == "[0.5, 3, true, 2]"


def _nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", {(1, 2): 3}, np.zeros(2), 1j, _nested(100_000)], ids=type)
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(frames.FrameError):
        frames.encode(value)


def test_a_length_too_long_to_be_true_is_refused() -> None:
    with pytest.raises(frames.FrameError, match="a frame of"):
        list(frames.FrameReader().feed(b"Traceback (most recent call last):"))


def test_a_circle_is_refused() -> None:
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(frames.FrameError):
        frames.encode(circle)
