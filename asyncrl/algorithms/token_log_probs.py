"""Log-probs and entropies of tokens from hidden states: logits exist in chunks of tokens, forward and backward, never all at once.

Legend: N tokens, n tokens of a chunk, H hidden size, V vocabulary. `head_log_probs` is the trainer's; `logits_log_probs` is its
definition.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from asyncrl.algorithms.matmul import input_gradient, linear, weight_gradient

CHUNK_ENTRIES = 1 << 20
"""Logits handled at once: 4 MiB in float32, which stays in a core's cache between the matrix product and the exponentials."""
LEAST_TOKENS = 64
"""Of a chunk, for the matrix product."""
KEEP_BYTES = 1 << 30
"""Softmax numerators kept for the backward pass at most. Where all would be more, none is kept: they are computed again, chunk by
chunk, from the hidden states."""
_LEAST_LOG = -1e4
"""Stands for the log of a probability of 0, so that their product is 0 and not NaN. In float64, too, exp(-1e4) is 0."""


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
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log_probs_N, entropy_N) as `logits_log_probs(hidden @ weight.T + bias)`. Float32 out (float64 for float64 in), natural logs.

    Log-probs are differentiable in hidden, weight and bias; the entropy is with entropy_gradient, at the price of a logarithm an
    entry in the backward pass. Memory beyond inputs and gradients: two or three chunks, and up to KEEP_BYTES from here to the
    backward pass where there will be one.
    """
    inputs = [hidden_NH, weight_VH, *([] if bias_V is None else [bias_V])]
    entry_bytes = 8 if hidden_NH.dtype == torch.float64 else 4
    has_backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    keeps = has_backward and len(hidden_NH) * len(weight_VH) * entry_bytes <= KEEP_BYTES
    result = _HeadLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias_V, labels_N, temperature, entropy_gradient, keeps
    )
    return cast("tuple[torch.Tensor, torch.Tensor]", result)


@torch.no_grad()
def head_sum_pi_squared(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, *, bias_V: torch.Tensor | None = None, temperature: float = 1.0
) -> torch.Tensor:
    """[N]: the sum over the vocabulary of squared probabilities of softmax((hidden @ weight.T + bias) / temperature).

    Without gradient; float32 (float64 for float64). 1 for a certain token, 1 / V for an even choice.
    """
    parts = []
    for at in _chunks(hidden_NH, weight_VH):
        logits = _scaled_logits(hidden_NH[at], weight_VH, bias_V, temperature)
        parts.append(logits.softmax(-1).square_().sum(-1))
    return torch.cat(parts)


class _HeadLogProbs(torch.autograd.Function):
    """z = logits / temperature, p = softmax(z), h the entropy: d log_prob / dz = one_hot - p, and dh / dz = -p (log p + h).

    Both are built in place over the numerators of p, which the forward pass has kept, or which are computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_N: torch.Tensor,
        temperature: float,
        entropy_gradient: bool,
        keeps: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept, log_probs, entropies = [], [], []
        for at in _chunks(hidden_NH, weight_VH):
            part = _softmax(hidden_NH[at], weight_VH, bias_V, labels_N[at], temperature)
            log_probs.append(part.log_probs_n)
            entropies.append(part.entropy_n)
            if keeps:
                kept.append(part)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, labels_N)
        ctx.temperature, ctx.kept = temperature, kept
        ctx.set_materialize_grads(False)
        log_probs_N, entropy_N = torch.cat(log_probs), torch.cat(entropies)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return log_probs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, labels_N = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, []  # the numerators are overwritten below: one backward pass only
        gradients = _Gradients.of(hidden_NH, weight_VH, bias_V, needed=ctx.needs_input_grad)
        for number, at in enumerate(_chunks(hidden_NH, weight_VH)):
            if kept:
                part, kept[number] = kept[number], None
            else:
                part = _softmax(hidden_NH[at], weight_VH, bias_V, labels_N[at], ctx.temperature)
            grads = [None if grad is None else grad[at] / ctx.temperature for grad in (grad_N, grad_entropy_N)]
            gradients.add(at, _logits_gradient(part, labels_N[at], *grads))
        return *gradients.found(), None, None, None, None


@dataclass(frozen=True, slots=True)
class _Softmax:
    """Of one chunk. numerators_nV: exp(z - max z), total_n: their sums."""

    log_probs_n: torch.Tensor
    entropy_n: torch.Tensor
    numerators_nV: torch.Tensor
    total_n: torch.Tensor


def _softmax(
    hidden_nH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, labels_n: torch.Tensor, temperature: float
) -> _Softmax:
    logits_nV = _scaled_logits(hidden_nH, weight_VH, bias_V, temperature)
    logits_nV.sub_(logits_nV.amax(1, keepdim=True))
    label_n = logits_nV.gather(1, labels_n[:, None])[:, 0]
    numerators_nV = logits_nV.exp()
    total_n = numerators_nV.sum(1)
    log_total_n = total_n.log()
    # sum p log p = sum p (logit - max) - log total
    entropy_n = log_total_n - (logits_nV.clamp_(min=_LEAST_LOG).mul_(numerators_nV)).sum(1) / total_n
    return _Softmax(label_n - log_total_n, entropy_n, numerators_nV, total_n)


def _scaled_logits(
    hidden_nH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    """Logits / temperature, float32 or wider, in memory of their own."""
    logits_nV = linear(hidden_nH, weight_VH, bias_V)
    if logits_nV.dtype in (torch.float16, torch.bfloat16):
        logits_nV = logits_nV.float()
    return logits_nV if temperature == 1.0 else logits_nV.div_(temperature)


def _logits_gradient(
    part: _Softmax, labels_n: torch.Tensor, grad_n: torch.Tensor | None, grad_entropy_n: torch.Tensor | None
) -> torch.Tensor:
    """[n, V], over the memory of the numerators. grad_n, grad_entropy_n: of the loss by log-prob and entropy, / temperature."""
    numerators_nV = part.numerators_nV
    row_n = torch.zeros_like(part.total_n) if grad_n is None else -grad_n / part.total_n
    if grad_entropy_n is None:
        gradient_nV = numerators_nV.mul_(row_n[:, None])
    else:
        slope_n = -grad_entropy_n / part.total_n
        log_numerators_nV = numerators_nV.log().clamp_(min=_LEAST_LOG)  # log p + log total
        row_n = row_n + slope_n * (part.entropy_n - part.total_n.log())
        gradient_nV = numerators_nV.mul_(log_numerators_nV.mul_(slope_n[:, None]).add_(row_n[:, None]))
    if grad_n is not None:
        gradient_nV.scatter_add_(1, labels_n[:, None], grad_n[:, None])
    return gradient_nV


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Of the inputs, summed chunk by chunk; None where nobody asked. The weight's is float32 where the weight is narrower: a sum of
    many chunks in bfloat16 would lose the small ones."""

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
    hidden_NH: torch.Tensor | None
    weight_VH: torch.Tensor | None
    bias_V: torch.Tensor | None

    @classmethod
    def of(cls, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, *, needed: Sequence[bool]) -> Self:
        wide = torch.promote_types(weight_VH.dtype, torch.float32)
        return cls(
            inputs=(hidden_NH, weight_VH, bias_V),
            hidden_NH=torch.empty_like(hidden_NH) if needed[0] else None,
            weight_VH=torch.zeros_like(weight_VH, dtype=wide) if needed[1] else None,
            bias_V=torch.zeros_like(bias_V, dtype=wide) if bias_V is not None and needed[2] else None,
        )

    def add(self, at: slice, gradient_nV: torch.Tensor) -> None:
        """The share of the chunk `at`. gradient_nV: of its scaled logits."""
        hidden_NH, weight_VH, _ = self.inputs
        if self.bias_V is not None:
            self.bias_V.add_(gradient_nV.sum(0))
        gradient_nV = gradient_nV.to(hidden_NH.dtype)
        if self.hidden_NH is not None:
            self.hidden_NH[at] = input_gradient(gradient_nV, weight_VH)
        if self.weight_VH is not None:
            self.weight_VH.add_(weight_gradient(gradient_nV, hidden_NH[at]))

    def found(self) -> tuple[torch.Tensor | None, ...]:
        """In the types of the inputs."""
        pairs = zip((self.hidden_NH, self.weight_VH, self.bias_V), self.inputs, strict=True)
        return tuple(None if sums is None or given is None else sums.to(given.dtype) for sums, given in pairs)


def _chunks(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> list[slice]:
    """The tokens in chunks of about CHUNK_ENTRIES logits; of no tokens one empty chunk."""
    size = max(LEAST_TOKENS, CHUNK_ENTRIES // weight_VH.shape[0])
    return [slice(begin, begin + size) for begin in range(0, max(len(hidden_NH), 1), size)]
