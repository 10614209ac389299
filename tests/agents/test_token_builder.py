"""The columns of a trajectory cannot come apart, and sampled ids stay as they were sampled."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.agents.token_builder import TokenBuilder
from asyncrl.errors import EngineError
from asyncrl.ports import Generation, StopReason, VersionSpan

END = 7
IDS = st.lists(st.integers(0, 9), max_size=6)


def generation(ids: list[int], *, version: int = 0, log_prob: float = -1.0) -> Generation:
    spans = [VersionSpan(start=0, end=len(ids), version=version)] if ids else []
    return Generation(token_ids=ids, log_probs=[log_prob] * len(ids), version_spans=spans, stop_reason=StopReason.STOP)


@given(IDS, st.lists(st.tuples(IDS, IDS)), IDS)
def test_columns_stay_aligned_and_sampled_ids_verbatim(
    prompt: list[int], turns: list[tuple[list[int], list[int]]], last: list[int]
) -> None:
    builder = TokenBuilder(prompt, end_token_id=END)
    sampled: list[int] = []
    for number, (ids, environment) in enumerate([*turns, (last, None)]):
        builder.add_sampled(generation(ids, version=number))
        sampled += ids
        if environment is not None:
            builder.add_environment(environment)
        columns = (builder.response_ids, builder.response_mask, builder.log_probs, builder.versions)
        assert {len(column) for column in columns} == {len(builder)}
    assert [token for token, mask in zip(builder.response_ids, builder.response_mask, strict=True) if mask] == sampled
    for mask, log_prob, version in zip(builder.response_mask, builder.log_probs, builder.versions, strict=True):
        assert (log_prob, version) == (0.0, -1) if not mask else log_prob == -1.0 and version >= 0
    assert builder.context_ids == [*prompt, *builder.response_ids]


@given(IDS, IDS)
def test_exactly_one_end_token_stands_before_the_environment(sampled: list[int], environment: list[int]) -> None:
    builder = TokenBuilder([1], end_token_id=END)
    builder.add_sampled(generation(sampled))
    cost = builder.environment_cost(environment)
    builder.add_environment(environment)
    ended = sampled[-1:] == [END]
    assert list(builder.response_ids) == [*sampled, *([] if ended else [END]), *environment]
    assert list(builder.response_mask) == [1] * len(sampled) + [0] * cost


def test_an_end_token_of_the_environment_does_not_end_the_next_turn() -> None:
    builder = TokenBuilder([1], end_token_id=END)
    builder.add_sampled(generation([2, END]))
    builder.add_environment([3, END])
    builder.add_sampled(generation([]))
    builder.add_environment([4])
    assert builder.response_ids == (2, END, 3, END, END, 4)


def test_a_turn_that_goes_on_keeps_what_was_sampled_last() -> None:
    builder = TokenBuilder([1], end_token_id=END)
    builder.add_sampled(generation([2]))
    builder.add_sampled(generation([3, END]))
    builder.add_sampled(generation([]))
    builder.add_environment([4])
    assert builder.response_ids == (2, 3, END, 4)


@pytest.mark.parametrize(
    ("log_probs", "spans"),
    [
        ([-1.0], [VersionSpan(start=0, end=2, version=0)]),
        ([-1.0, -1.0], []),
        ([-1.0, math.nan], [VersionSpan(start=0, end=2, version=0)]),
    ],
)
def test_an_engine_that_miscounts_is_refused_and_nothing_grows(log_probs: list[float], spans: list[VersionSpan]) -> None:
    builder = TokenBuilder([1], end_token_id=END)
    with pytest.raises(EngineError):
        builder.add_sampled(Generation(token_ids=[2, 3], log_probs=log_probs, version_spans=spans, stop_reason=StopReason.STOP))
    assert len(builder) == 0
    assert builder.log_probs == ()
