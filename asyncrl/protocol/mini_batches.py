"""Mini-batches: which rows of a batch make up one optimizer step.

A mini-batch is a number of whole groups (`groups_stay_together`), however many rows they have. Padding rows are no groups: they
fill up the mini-batch in which they stand and never make one of their own, which would be an optimizer step without a gradient.

Where we differ from verl 0.9.1: it cuts a batch by a number of rows, after it has balanced all of them, so a group is spread over
mini-batches, and sessions of several trajectories change the number of steps.
"""

from collections.abc import Sequence

import torch


def numbered(names: Sequence[str | None]) -> torch.Tensor:
    """int64 [B]: rows of one name share a number, by first appearance; each None (a padding row) has one of its own."""
    numbers: dict[str | int, int] = {}
    return torch.tensor([numbers.setdefault(row if name is None else name, len(numbers)) for row, name in enumerate(names)])


def mini_batches(groups: Sequence[str | None], groups_each: int) -> list[list[int]]:
    """Row numbers of each mini-batch: whole groups, in order of first appearance, rows in batch order within a group.

    groups: uid of each row; None for a padding row, which goes with the row before it (before any row: with the one after it).
    ["a", "b", "a", "c"] with 2 groups each -> [[0, 2, 1], [3]]. Without a group there is no mini-batch.
    """
    members: dict[str, list[int]] = {}
    leading: list[int] = []
    last: list[int] | None = None
    for row, uid in enumerate(groups):
        if uid is not None:
            last = members.setdefault(uid, leading if not members else [])
            last.append(row)
        else:
            (leading if last is None else last).append(row)
    rows = list(members.values())
    return [[row for group in rows[start : start + groups_each] for row in group] for start in range(0, len(rows), groups_each)]
