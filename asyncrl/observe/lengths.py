"""How long what was generated is, beside what was trained: a rule that prefers short answers shows as a gap between the two."""

from collections.abc import Sequence

_RANKS = {"p50": 0.5, "p90": 0.9}


def length_metrics(generated: Sequence[int], trained: Sequence[int]) -> dict[str, float]:
    """`length/generated_*` and `length/trained_*`: mean, p50 and p90 of policy tokens a trajectory; nothing of an empty side."""
    return {**_of("generated", generated), **_of("trained", trained)}


def _of(name: str, lengths: Sequence[int]) -> dict[str, float]:
    if not lengths:
        return {}
    rising = sorted(lengths)
    ranks = {rank: float(rising[int((len(rising) - 1) * share)]) for rank, share in _RANKS.items()}
    return {f"length/{name}_{part}": value for part, value in {"mean": sum(rising) / len(rising), **ranks}.items()}
