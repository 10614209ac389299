"""A session of several rows as one sequence. Place: rows of a batch -> [pack] -> advantages, correction -> [unpack] -> rows.

An agent may hand in its session in several rows (sub-agents, a rewritten history). How it cuts them must not matter for what is
learned: packed, a session is one sequence. It weighs once in its group, its return runs through all its rows, and its weight as a
sequence is one number. Legend: B rows, R response tokens of a row, S sessions, T tokens of the longest session, n tokens in all.
"""

from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """Where each token of the rows lies in the sessions. Sessions are numbered by their first row, so one row each is the identity.

    sessions_B: int64, 0 .. num_sessions - 1; last_rows_S: int64, the last row with a token of each session (of sessions without any
    token the last row). from_n and to_n, int64: a token's place in the flat rows and in the flat sessions.
    """

    sessions_B: torch.Tensor
    last_rows_S: torch.Tensor
    from_n: torch.Tensor
    to_n: torch.Tensor
    num_columns: int
    """R."""
    session_len: int
    """T."""
    is_identity: bool
    """Every session is one row: `pack` and `unpack` hand their input back, with T = R."""

    @classmethod
    def of(cls, lengths_B: torch.Tensor, sessions_B: torch.Tensor, *, num_columns: int | None = None) -> Self:
        """lengths_B: int64, tokens of each row (inner gaps included); sessions_B: int64, any numbering of the sessions.

        The rows of a session follow each other in batch order; other sessions' rows may lie between them. num_columns is R when it
        is more than the longest row. Raises ValueError when the two differ in shape.
        """
        if lengths_B.shape != sessions_B.shape:
            raise ValueError(f"{len(lengths_B)} lengths for {len(sessions_B)} session numbers: one of each a row")
        width = int(lengths_B.max()) if len(lengths_B) else 0
        width = width if num_columns is None else num_columns
        sessions_B, num_sessions = _numbered_by_first_row(sessions_B)
        rows_B = torch.arange(len(lengths_B), device=lengths_B.device)
        if num_sessions == len(lengths_B):
            return cls(
                sessions_B=sessions_B,
                last_rows_S=rows_B,
                from_n=rows_B[:0],
                to_n=rows_B[:0],
                num_columns=width,
                session_len=width,
                is_identity=True,
            )
        starts_B, session_len = _starts(lengths_B, sessions_B, num_sessions)
        rows_n = torch.repeat_interleave(rows_B, lengths_B)
        columns_n = torch.arange(len(rows_n), device=rows_n.device) - (lengths_B.cumsum(0) - lengths_B)[rows_n]
        return cls(
            sessions_B=sessions_B,
            last_rows_S=_last_rows(lengths_B, sessions_B, num_sessions),
            from_n=rows_n * width + columns_n,
            to_n=sessions_B[rows_n] * session_len + starts_B[rows_n] + columns_n,
            num_columns=width,
            session_len=session_len,
            is_identity=False,
        )

    def pack(self, rows_BR: torch.Tensor) -> torch.Tensor:
        """[S, T] of the same dtype: the rows of each session one behind the other; 0 (False) behind the last."""
        if self.is_identity:
            return rows_BR
        shape = (len(self.last_rows_S), self.session_len)
        return _moved(rows_BR, self.from_n, self.to_n, shape)

    def unpack(self, sessions_ST: torch.Tensor) -> torch.Tensor:
        """[B, R], the inverse of `pack`; 0 (False) behind the length of a row."""
        if self.is_identity:
            return sessions_ST
        shape = (len(self.sessions_B), self.num_columns)
        return _moved(sessions_ST, self.to_n, self.from_n, shape)

    def of_sessions(self, values_B: torch.Tensor) -> torch.Tensor:
        """[S]: one number a row -> one a session, that of its last row."""
        return values_B if self.is_identity else values_B[self.last_rows_S]

    def of_rows(self, values_S: torch.Tensor) -> torch.Tensor:
        """[B]: one number a session -> the same on each of its rows."""
        return values_S if self.is_identity else values_S[self.sessions_B]


def session_rewards(scores_BR: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Token-level scores in which each session's score counts once: that of its last row with a token; earlier rows get 0.

    The score belongs to the session and stands on every row of it, so that a row can be read alone; added up, it would count as
    often as the session has rows. Per-token penalties (KL in the reward) belong to their tokens: subtract them after this.
    """
    if packing.is_identity:
        return scores_BR
    is_last_B = torch.zeros(len(scores_BR), dtype=torch.bool, device=scores_BR.device)
    return torch.where(is_last_B.index_fill(0, packing.last_rows_S, True)[:, None], scores_BR, 0.0)


def _moved(values: torch.Tensor, from_n: torch.Tensor, to_n: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Zeros of the shape, with values[from_n] at to_n (both count through the flat tensors)."""
    moved = values.new_zeros(shape[0] * shape[1])
    return moved.index_copy(0, to_n, values.reshape(-1)[from_n]).view(shape)


def _numbered_by_first_row(sessions_B: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The sessions as 0, 1, ... in the order of their first rows, and how many they are."""
    unique, index_B = torch.unique(sessions_B, return_inverse=True)
    rows_B = torch.arange(len(sessions_B), device=sessions_B.device)
    first_S = rows_B.new_zeros(len(unique)).scatter_reduce(0, index_B, rows_B, "amin", include_self=False)
    return torch.argsort(torch.argsort(first_S))[index_B], len(unique)


def _starts(lengths_B: torch.Tensor, sessions_B: torch.Tensor, num_sessions: int) -> tuple[torch.Tensor, int]:
    """int64 [B], where each row begins in its session, and the length of the longest session."""
    order_B = torch.argsort(sessions_B, stable=True)
    behind_B = lengths_B[order_B].cumsum(0)
    totals_S = lengths_B.new_zeros(num_sessions).index_add(0, sessions_B, lengths_B)
    before_S = totals_S.cumsum(0) - totals_S
    starts_B = behind_B - lengths_B[order_B] - before_S[sessions_B[order_B]]
    return torch.empty_like(starts_B).index_copy(0, order_B, starts_B), int(totals_S.max())


def _last_rows(lengths_B: torch.Tensor, sessions_B: torch.Tensor, num_sessions: int) -> torch.Tensor:
    """int64 [S]. A row with a token outranks any row without."""
    rows_B = torch.arange(len(lengths_B), device=lengths_B.device)
    rank_B = rows_B + len(rows_B) * (lengths_B > 0)
    highest_S = rank_B.new_zeros(num_sessions).scatter_reduce(0, sessions_B, rank_B, "amax", include_self=False)
    return highest_S % len(rows_B)
