"""How token losses become one number: every mode is a weight a token, so the loss of a mini-batch is a plain weighted sum.

That makes the loss independent of how the mini-batch is cut: the weights come from the counts of the whole mini-batch (over all
ranks), and the parts of a sum can be added in any grouping. Legend: B rows, R response tokens.

Where we differ from verl 0.9.1:
1. One mask (policy tokens that were not rejected) gives both numerator and denominators; verl sums another mask for the tokens of
   token-mean and takes a constant for the rows, so a mini-batch with rejected tokens or padding rows has a smaller loss.
2. A sequence may be a session of several rows: it counts once, however it is split.
3. seq-mean-token-sum-norm has no default scale: verl's, the padded width of a micro-batch, makes the loss depend on the split.
4. Nothing is added to a denominator (verl: 1e-8); a row without tokens has no loss at all.
"""

from typing import Literal, get_args

import torch

AggregationMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def token_weights(
    mask_BR: torch.Tensor,
    mode: AggregationMode,
    *,
    num_tokens: float | None = None,
    num_rows: float | None = None,
    sequences_B: torch.Tensor | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Weights_BR, of dtype, zero outside the mask, such that `(loss_BR * weights_BR).sum()` is the aggregated loss.

    mask_BR: bool, True on policy tokens that count. sequences_B: int64, any numbering, the sequence (session) of each row; all rows
    of a sequence must be in mask_BR. None: every row is a sequence. num_tokens and num_rows are the totals of the mini-batch over
    all ranks: True entries, and sequences with at least one. Without them they are counted from mask_BR (`count_sequences`).

    - token-mean: 1 / tokens. Every token counts the same (DAPO, arXiv 2503.14476 eq. 8).
    - token-sum: 1.
    - seq-mean-token-sum: 1 / sequences. Long answers weigh more (Dr. GRPO without its constant, arXiv 2503.20783).
    - seq-mean-token-mean: 1 / (sequences * tokens of the sequence). Every answer weighs the same (GRPO, arXiv 2402.03300 eq. 3).
    - seq-mean-token-sum-norm: 1 / (sequences * scale), scale such as the longest response allowed (Dr. GRPO, arXiv 2503.20783).

    Sequences without a policy token count nowhere; a mask without any True gives zeros.
    Raises ValueError for another mode, and for seq-mean-token-sum-norm without a positive scale.
    """
    mask_BR = mask_BR.double()
    tokens_B = _sequence_tokens(mask_BR, sequences_B)
    rows = max(float(count_sequences(mask_BR, sequences_B)) if num_rows is None else num_rows, 1.0)
    if mode == "token-mean":
        weights_BR = mask_BR / max(float(mask_BR.sum()) if num_tokens is None else num_tokens, 1.0)
    elif mode == "token-sum":
        weights_BR = mask_BR
    elif mode == "seq-mean-token-sum":
        weights_BR = mask_BR / rows
    elif mode == "seq-mean-token-mean":
        weights_BR = mask_BR / (tokens_B[:, None].clamp(min=1) * rows)
    elif mode == "seq-mean-token-sum-norm":
        if scale is None or scale <= 0:
            raise ValueError(f"seq-mean-token-sum-norm needs a positive scale, such as the longest response allowed, not {scale}")
        weights_BR = mask_BR / (rows * scale)
    else:
        raise ValueError(f"loss aggregation {mode!r} is not one of {', '.join(get_args(AggregationMode))}")
    return weights_BR.to(dtype)


def count_sequences(mask_BR: torch.Tensor, sequences_B: torch.Tensor | None = None) -> int:
    """How many sequences have a True entry. sequences_B: int64, any numbering; None: every row is a sequence."""
    has_token_B = mask_BR.bool().any(1)
    if sequences_B is None:
        return int(has_token_B.sum())
    return int(torch.unique(sequences_B[has_token_B]).numel())


def _sequence_tokens(mask_BR: torch.Tensor, sequences_B: torch.Tensor | None) -> torch.Tensor:
    """float64 [B]: tokens of the whole sequence of each row."""
    tokens_B = mask_BR.sum(1)
    if sequences_B is None:
        return tokens_B
    numbers_B = torch.unique(sequences_B, return_inverse=True)[1]
    return torch.zeros_like(tokens_B).index_add_(0, numbers_B, tokens_B)[numbers_B]
