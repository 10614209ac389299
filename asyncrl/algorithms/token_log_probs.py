"""Log-probs and entropies of tokens from hidden states, without ever holding more than one chunk of full-vocabulary gradients.

Legend: N tokens, H hidden size, V vocabulary. `head_log_probs` is the fast one (trainer); `logits_log_probs` is its definition.
"""

from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from asyncrl.algorithms.matmul import input_gradient, linear, weight_gradient

CHUNK_ENTRIES = 1 << 20
"""Logits handled at once: 4 MiB in float32, which stays in a core's cache between the matrix product and the exponentials."""
KEEP_BYTES = 1 << 30
"""Softmax numerators kept for the backward pass at most; beyond it they are computed again from the hidden states."""


def logits_log_probs(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log_probs_N of the labels, entropy_N of the distribution) of softmax(logits / temperature): natural logs, float32 or wider.

    logits_NV: float; labels_N: int64.
    """
    logits_NV = logits_NV / temperature if logits_NV.dtype == torch.float64 else logits_NV.float() / temperature
    log_softmax_NV = logits_NV.log_softmax(-1)
    # nll_loss rather than gather: FSDP warns about outputs that are views
    log_probs_N = -functional.nll_loss(log_softmax_NV, labels_N, reduction="none")
    return log_probs_N, -(log_softmax_NV.exp() * log_softmax_NV).sum(-1)


def head_log_probs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log_probs_N, entropy_N) as `logits_log_probs(hidden @ weight.T + bias)`; the entropy carries no gradient.

    Log-probs are differentiable in hidden, weight and bias. Float32 out (float64 for float64 in), natural logs.
    """
    result = _HeadLogProbs.apply(hidden_NH, weight_VH, bias_V, labels_N, temperature)  # type: ignore[no-untyped-call]
    return cast("tuple[torch.Tensor, torch.Tensor]", result)


@torch.no_grad()
def head_sum_pi_squared(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, *, bias_V: torch.Tensor | None = None, temperature: float = 1.0
) -> torch.Tensor:
    """[N]: the sum over the vocabulary of squared probabilities of softmax((hidden @ weight.T + bias) / temperature).

    Without gradient; float32 (float64 for float64). 1 for a certain token, 1 / V for an even choice.
    """
    parts = []
    for (hidden,) in zip(*_chunks(weight_VH, hidden_NH), strict=True):
        logits = linear(hidden, weight_VH, bias_V)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        parts.append((logits / temperature).softmax(-1).square().sum(-1))
    return torch.cat(parts)


class _HeadLogProbs(torch.autograd.Function):
    """d log_prob / d logits = (one_hot - softmax) / temperature, built in place over the numerators that the forward pass kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_N: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            _forward_chunk(hidden, weight_VH, bias_V, labels, temperature)
            for hidden, labels in zip(*_chunks(weight_VH, hidden_NH, labels_N), strict=True)
        ]
        needs_backward = any(ctx.needs_input_grad[:3])
        kept_bytes = sum(part[2].nbytes for part in parts) if needs_backward else KEEP_BYTES + 1
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, labels_N)
        ctx.temperature = temperature
        ctx.kept = [(part[2], part[3]) for part in parts] if kept_bytes <= KEEP_BYTES else None
        log_probs_N, entropy_N = (torch.cat([part[at] for part in parts]) for at in (0, 1))
        ctx.mark_non_differentiable(entropy_N)
        return log_probs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, labels_N = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None  # the numerators are overwritten below: one backward pass only
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = torch.zeros_like(weight_VH)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V)
        chunks = zip(*_chunks(weight_VH, hidden_NH, labels_N, grad_N, grad_hidden_NH), strict=True)
        for number, (hidden, labels, grad, grad_hidden) in enumerate(chunks):
            if kept is None:
                numerators, total = _forward_chunk(hidden, weight_VH, bias_V, labels, ctx.temperature)[2:]
            else:
                numerators, total = kept[number]
            scale = grad / ctx.temperature
            grad_logits = numerators.mul_((-scale / total)[:, None])
            grad_logits.scatter_add_(1, labels[:, None], scale[:, None])
            if grad_bias_V is not None:
                grad_bias_V += grad_logits.sum(0).to(grad_bias_V.dtype)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden.copy_(input_gradient(grad_logits, weight_VH))
            grad_weight_VH += weight_gradient(grad_logits, hidden)
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None


def _forward_chunk(
    hidden_nH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, labels_n: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """log_probs_n, entropy_n, numerators_nV = exp(logits - max), and their sums_n."""
    logits_nV = linear(hidden_nH, weight_VH, bias_V)
    if logits_nV.dtype in (torch.float16, torch.bfloat16):
        logits_nV = logits_nV.float()
    if temperature != 1.0:
        logits_nV.div_(temperature)
    logits_nV.sub_(logits_nV.amax(1, keepdim=True))
    label_n = logits_nV.gather(1, labels_n[:, None])[:, 0]
    numerators_nV = logits_nV.exp()
    total_n = numerators_nV.sum(1)
    log_total_n = total_n.log()
    # sum p log p = sum p (logit - max) - log total; a logit of -inf has p = 0 and would make 0 x -inf
    entropy_n = log_total_n - (logits_nV.clamp_(min=-1e30).mul_(numerators_nV)).sum(1) / total_n
    return label_n - log_total_n, entropy_n, numerators_nV, total_n


def _chunks(weight_VH: torch.Tensor, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Each tensor cut along the tokens into chunks of about CHUNK_ENTRIES logits (at least 64 tokens, for the matrix product)."""
    size = max(64, CHUNK_ENTRIES // weight_VH.shape[0])
    return [torch.split(tensor, size) for tensor in tensors]
