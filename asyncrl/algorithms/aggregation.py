"""How token losses become one number: every mode is a weight a token, so the loss of a mini-batch is a plain weighted sum.

That makes the loss independent of how the mini-batch is cut: the weights come from the counts of the whole mini-batch (over all
ranks), and the parts of a sum can be added in any grouping. Legend: B rows, R response tokens.
"""

from typing import Literal, get_args

import torch

AggregationMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


def token_weights(
    mask_BR: torch.Tensor,
    mode: AggregationMode,
    *,
    num_tokens: float | None = None,
    num_rows: float | None = None,
) -> torch.Tensor:
    """Weights_BR, float32, zero outside the mask, such that `(loss_BR * weights_BR).sum()` is the aggregated loss.

    mask_BR: bool, True on policy tokens. num_tokens and num_rows are the totals of the mini-batch over all ranks (True entries, and
    rows with at least one); without them they are counted from mask_BR.

    - token-mean: 1 / tokens. Every token counts the same (DAPO, arXiv 2503.14476).
    - seq-mean-token-sum: 1 / rows. Long answers weigh more (Dr. GRPO without its constant, arXiv 2503.20783).
    - seq-mean-token-mean: 1 / (rows * tokens of the row). Every answer weighs the same (GRPO, arXiv 2402.03300).

    Rows without a policy token count nowhere; a mask without any True gives zeros. Raises ValueError for another mode.
    """
    mask_BR = mask_BR.double()
    row_tokens_B1 = mask_BR.sum(1, keepdim=True)
    rows = max(float((row_tokens_B1 > 0).sum()) if num_rows is None else num_rows, 1.0)
    if mode == "token-mean":
        weights_BR = mask_BR / max(float(row_tokens_B1.sum()) if num_tokens is None else num_tokens, 1.0)
    elif mode == "seq-mean-token-sum":
        weights_BR = mask_BR / rows
    elif mode == "seq-mean-token-mean":
        weights_BR = mask_BR / (row_tokens_B1.clamp(min=1) * rows)
    else:
        raise ValueError(f"loss aggregation {mode!r} is not one of {', '.join(get_args(AggregationMode))}")
    return weights_BR.float()
