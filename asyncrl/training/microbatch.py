"""Micro-batches under a token budget: rows of similar length go together, padding counts. Pure integers; no tensors."""

from collections.abc import Sequence


def pack_micro_batches(lengths: Sequence[int], max_tokens: int, *, together: Sequence[int] = ()) -> list[list[int]]:
    """Row numbers of each micro-batch, longest rows first (the largest allocation comes first, so memory is found out at once).

    The padded size of a micro-batch, rows x longest row, is at most max_tokens; a row longer than that goes alone. Every row is in
    exactly one micro-batch. The order depends on the lengths alone, ties in row order. together: a number for each row; rows of one
    number are not parted, whatever their size.

    lengths [3, 9, 4, 8], max_tokens 18 -> [[1, 3], [2, 0]].
    """
    if max_tokens < 1:
        raise ValueError(f"a micro-batch of {max_tokens} tokens holds nothing; give at least 1")
    units: dict[int, list[int]] = {}
    for row in range(len(lengths)):
        units.setdefault(together[row] if together else row, []).append(row)
    batches: list[list[int]] = []
    width = 0
    for rows in sorted(units.values(), key=lambda rows: -max(lengths[row] for row in rows)):
        if not batches or (len(batches[-1]) + len(rows)) * width > max_tokens:
            batches.append([])
            width = max(lengths[row] for row in rows)
        batches[-1].extend(rows)
    return batches
