"""Sums over forwards of one kind, from which seconds = a + b x size can be found exactly by least squares, whenever and by whom.

scheduler -> [work_sums] -> stats -> `engine/*` of metrics.jsonl -> simulation's fit

Five sums are all that such a fit needs: no forward is kept, and the fit over a stretch of a run is that of the sums' differences.
The engine's thread adds, any other may read: the sums are one tuple that is replaced, so nobody sees half of a forward.
"""


class WorkSums:
    """Sums over forwards; they only grow. A forward's size is its rows, or its tokens; seconds are those of a monotonic clock."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def add(self, size: int, seconds: float, forwards: float = 1.0) -> None:
        """A forward of `size` that took `seconds`; or several of that size, that took as long together."""
        count, sizes, squares, total_s, products_s = self._sums
        num = size * forwards
        self._sums = (count + forwards, sizes + num, squares + size * num, total_s + seconds, products_s + size * seconds)

    def stats(self, kind: str, noun: str, size: str) -> dict[str, float]:
        """`<kind>_<noun>` forwards, `<kind>_<size>` and its squares `_sq`, `<kind>_s` seconds, `<kind>_<size>_s` size x seconds."""
        count, sizes, squares, total_s, products_s = self._sums
        return {
            f"{kind}_{noun}": count,
            f"{kind}_{size}": sizes,
            f"{kind}_{size}_sq": squares,
            f"{kind}_s": total_s,
            f"{kind}_{size}_s": products_s,
        }
