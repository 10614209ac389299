"""Lengths of what was generated and of what was trained."""

from asyncrl.observe.lengths import length_metrics


def test_each_side_has_its_mean_and_ranks() -> None:
    found = length_metrics([*range(1, 12)], [7])
    assert found == {
        "length/generated_mean": 6.0,
        "length/generated_p50": 6.0,
        "length/generated_p90": 10.0,
        "length/trained_mean": 7.0,
        "length/trained_p50": 7.0,
        "length/trained_p90": 7.0,
    }


def test_an_empty_side_has_none() -> None:
    """A step may train while nothing settles."""
    assert set(length_metrics([], [3, 4])) == {"length/trained_mean", "length/trained_p50", "length/trained_p90"}
    assert length_metrics([], []) == {}
