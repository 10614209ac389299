"""The rows that sample together, as arrays: rebuilt when a row joins or leaves, advanced by one token otherwise."""

from collections.abc import Sequence

import numpy as np
import torch

from asyncrl.rollout.requests import Row
from asyncrl.rollout.sampling import RowParams, sample, uniforms

SEED_MASK = (1 << 64) - 1
"""Seeds may be any integers; the counter-based generator takes 64 bits."""


class Batch:
    """Newest tokens, positions and sampling parameters of some rows, in their order."""

    def __init__(self, rows: Sequence[Row]) -> None:
        sampling = [row.request.sampling for row in rows]
        self.tokens = torch.tensor([row.ids[-1] for row in rows])
        self.positions = torch.tensor([len(row.ids) - 1 for row in rows])
        self._params = RowParams.stack(
            [each.temperature for each in sampling], [each.top_k for each in sampling], [each.top_p for each in sampling]
        )
        self._seeds = np.array([row.request.seed & SEED_MASK for row in rows], dtype=np.uint64)
        self._counts = np.array([row.num_new for row in rows], dtype=np.uint64)

    def sample(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """Draw the next token of each row, and step forward by it. logits: float32 [rows, vocab], overwritten."""
        ids, log_probs = sample(logits, self._params, uniforms(self._seeds, self._counts))
        self.tokens = ids
        self.positions = self.positions + 1
        self._counts += np.uint64(1)
        return ids.tolist(), log_probs.tolist()
