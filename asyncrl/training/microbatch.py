"""Micro-batches under a token budget, as many on every rank. Pure integers; no tensors.

rows of each rank -> [microbatch] -> passes over the model, on all ranks the same number

Ranks meet in every pass: weights are gathered and gradients reduced there. So a rank that has fewer micro-batches than another
joins in passes of its own with nothing in them. Each rank works out the micro-batches of all ranks from the lengths of all rows, so
they agree without asking one another, and what cannot be done is raised by all of them, before any pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one pass may hold.

    max_tokens: positions, those of padding too, over the ranks that share a row. is_packed: rows lie one behind the other without
    padding. multiple: positions are filled up to a multiple of it. is_hard: a row above the budget is an error; else it goes alone.
    key: of the configuration, for the error.
    """

    max_tokens: int
    is_packed: bool = False
    multiple: int = 1
    is_hard: bool = True
    key: str = "actor.ppo_max_token_len_per_gpu"

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"a micro-batch of {self.max_tokens} tokens holds nothing; give at least 1")

    def size(self, *, longest: int, total: int, count: int) -> int:
        """Positions of a micro-batch of `count` rows, of `total` tokens, the longest of `longest`."""
        filled = total if self.is_packed else longest
        filled += -filled % self.multiple
        return filled if self.is_packed else filled * count


def pack_micro_batches(
    lengths: Sequence[int], budget: Budget, *, rows: Sequence[int] | None = None, together: Sequence[int] = ()
) -> list[list[int]]:
    """Row numbers of each micro-batch, longest rows first (the largest allocation comes first, so memory is found out at once).

    rows: which of all; None: all of them. Each is in exactly one micro-batch, and none of these is above a hard budget. The order
    depends on the lengths alone, ties in the order of `rows`. together: a number for each of all rows; rows of one number are not
    parted.
    Raises ConfigError for a row, or rows kept together, above a hard budget.

    lengths [3, 9, 4, 8], max_tokens 18 -> [[1, 3], [2, 0]].
    """
    units: dict[int, list[int]] = {}
    for row in range(len(lengths)) if rows is None else rows:
        units.setdefault(together[row] if together else row, []).append(row)
    batches: list[list[int]] = []
    longest, total = 0, 0  # of the last micro-batch
    for unit in sorted(units.values(), key=lambda unit: -max(lengths[row] for row in unit)):
        own = [lengths[row] for row in unit]
        if (
            not batches
            or budget.size(longest=longest, total=total + sum(own), count=len(batches[-1]) + len(own)) > budget.max_tokens
        ):
            _check_fits(unit, own, budget)
            batches.append([])
            longest, total = max(own), 0
        batches[-1].extend(unit)
        total += sum(own)
    return batches


def agreed_micro_batches(
    lengths: Sequence[int], ranks: Sequence[Sequence[int]], budget: Budget, *, together: Sequence[int] = ()
) -> list[list[list[int]]]:
    """[rank][micro-batch] -> rows; every rank has as many as the one that needs most. []: the rank only joins.

    ranks: rows of each. The rest, and what is raised, whatever rank has the row, as `pack_micro_batches`.
    """
    packed = [pack_micro_batches(lengths, budget, rows=rows, together=together) for rows in ranks]
    most = max(map(len, packed), default=0)
    return [own + [[] for _ in range(most - len(own))] for own in packed]


def _check_fits(rows: Sequence[int], lengths: Sequence[int], budget: Budget) -> None:
    needed = budget.size(longest=max(lengths), total=sum(lengths), count=len(lengths))
    if needed <= budget.max_tokens or not budget.is_hard:
        return
    what = f"row {rows[0]} has {lengths[0]} tokens"
    if len(rows) > 1:
        shape = " + ".join(map(str, lengths)) if budget.is_packed else f"{len(lengths)} x {max(lengths)}"
        what = f"rows {', '.join(map(str, rows))} are kept together and take {shape} = {needed} tokens"
    raise ConfigError(f"{what}, and a micro-batch holds {budget.max_tokens} ({budget.key}); raise it to {needed} or more")
