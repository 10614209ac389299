"""Balanced partition of numbers by largest differencing: which rows go to which rank or micro-batch. Integers, no tensors.

Invariants: the result depends on the numbers alone, never on a hash or on time; every item is in exactly one part; the heaviest and
the lightest part differ by no more than the largest number (with equal counts: the widest of the slices it starts from).

Source: Karmarkar and Karp, "The differencing method of set partitioning", 1982; the form for k parts and the one with equal
counts: Michiels, Korst, Aarts, van Leeuwen, "Performance ratios for the differencing method applied to the balanced number
partitioning problem", STACS 2003.
"""

import heapq
import itertools
from collections.abc import Sequence

LINEAR_WORK = 24576
"""Work of a token's matrix products where a pair of positions is 1: 6 x hidden size, at hidden size 4096 (see `workload`)."""

_Parts = list[tuple[int, list[int]]]
"""Parts of some of the items as (sum, items), heaviest first."""


def workload(seq_len: int) -> int:
    """Relative cost of a row: 24576 L + L^2, where L = prompt and response tokens.

    A forward pass of one dense transformer layer of hidden size h costs 24 h^2 L operations in its matrix products (8 h^2 for the
    four of attention, 16 h^2 for a feed-forward four times as wide) and 4 h L^2 between positions. Divided by 4 h: 6 h L + L^2. The
    constant is that of h = 4096, as verl 0.9.1 has it, so that figures compare; the two terms are equal at L = 24576. It weighs
    tokens more than a smaller model would, which matters for long rows only.
    """
    return LINEAR_WORK * seq_len + seq_len * seq_len


def partition(weights: Sequence[int], num_parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Item numbers of each part, rising; the parts by falling sum of weights. A part is empty where there are too few items.

    weights: numbers from 0. equal_counts: every part gets len(weights) / num_parts items, which costs balance.
    [8, 7, 6, 5, 4] in 2 parts -> [[1, 3, 4], [0, 2]], sums 16 and 14; the optimum is 15 and 15. With hundreds of items the sums are
    equal to a fraction of an item.

    Without equal counts the heaviest part is at most 4/3 of the optimum's. With them it starts from slices of neighbouring weights,
    so an item far above the others leaves its part too heavy by up to its lead.
    Raises ValueError without a part, and when equal counts are impossible.
    """
    if num_parts < 1:
        raise ValueError(f"{num_parts} parts hold nothing; give at least 1")
    if equal_counts and len(weights) % num_parts:
        raise ValueError(f"{len(weights)} items cannot make {num_parts} parts of equal counts: {_arithmetic(weights, num_parts)}")
    parts = _differencing(_starts(weights, num_parts, num_parts if equal_counts else 1), num_parts)
    return [sorted(items) for _, items in parts]


def partition_under_cap(lengths: Sequence[int], max_tokens: int, *, group_size: int = 1, at_least: int = 1) -> list[list[int]]:
    """Parts of balanced workload, each of at most `max_tokens` tokens, as few as differencing finds; rows as in `partition`.

    lengths: tokens of each row. group_size: so many consecutive rows stay together. at_least: parts that others need, so that ranks
    can agree on one number: each takes the largest of all numbers and asks again.
    Raises ValueError when no number of parts does it: a group has more tokens than the cap, or groups are fewer than at_least.
    """
    if group_size < 1 or len(lengths) % group_size:
        raise ValueError(f"{len(lengths)} rows cannot stay together in groups of {group_size}")
    groups = [range(start, start + group_size) for start in range(0, len(lengths), group_size)]
    tokens = [sum(lengths[row] for row in group) for group in groups]
    work = [sum(workload(lengths[row]) for row in group) for group in groups]
    fewest = max(-(-sum(tokens) // max_tokens), at_least)
    for num_parts in range(fewest, len(groups) + 1):
        parts = partition(work, num_parts)
        if all(sum(tokens[item] for item in part) <= max_tokens for part in parts):
            return [[row for item in part for row in groups[item]] for part in parts]
    raise ValueError(
        f"{len(groups)} groups of {group_size} rows do not fit under {max_tokens} tokens in {fewest} parts or more; "
        f"the longest group has {max(tokens, default=0)} tokens"
    )


def contiguous(count: int, num_parts: int) -> list[range]:
    """The numbers below count in contiguous parts of equal size, the first ones a number larger where it does not divide."""
    each, rest = divmod(count, num_parts)
    ends = [part * each + min(part, rest) for part in range(num_parts + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def _starts(weights: Sequence[int], num_parts: int, size: int) -> list[_Parts]:
    """The items by falling weight in slices of `size`, each item a part of its own, filled up with empty parts."""
    order = sorted(range(len(weights)), key=lambda item: -weights[item])
    slices = [order[start : start + size] for start in range(0, len(order), size)]
    return [[(weights[item], [item]) for item in items] + [(0, []) for _ in range(num_parts - size)] for items in slices]


def _differencing(starts: list[_Parts], num_parts: int) -> _Parts:
    """Join the two solutions of the widest spread until one is left, heavy parts with light ones. Takes `starts` apart."""
    # the number breaks ties: solutions are never compared
    heap = [(parts[-1][0] - parts[0][0], number, parts) for number, parts in enumerate(starts)]
    heapq.heapify(heap)
    for number in range(len(starts), 2 * len(starts) - 1):
        _, _, wide = heapq.heappop(heap)
        _, _, narrow = heap[0]
        joined = sorted(map(_join, wide, reversed(narrow)), key=_negative_sum)
        heapq.heapreplace(heap, (joined[-1][0] - joined[0][0], number, joined))
    return heap[0][2] if heap else [(0, []) for _ in range(num_parts)]


def _join(left: tuple[int, list[int]], right: tuple[int, list[int]]) -> tuple[int, list[int]]:
    """One part of two; the longer list of items takes in the shorter, so that no item moves more than log n times."""
    items, fewer = (left[1], right[1]) if len(left[1]) >= len(right[1]) else (right[1], left[1])
    items.extend(fewer)
    return left[0] + right[0], items


def _negative_sum(part: tuple[int, list[int]]) -> int:
    return -part[0]


def _arithmetic(weights: Sequence[int], num_parts: int) -> str:
    count, rest = divmod(len(weights), num_parts)
    return f"{len(weights)} = {num_parts} x {count} + {rest}, {num_parts - rest} more are needed"
