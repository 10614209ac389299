"""Passes over [B, R] tensors in blocks of rows that fit the processor's cache: a large temporary costs more than the arithmetic.

A fresh tensor of 4,096 x 2,048 float32 takes 13 ms of one core to be mapped into memory, its sum 1 ms. So what is only read goes
through in blocks, and what is returned is written once. Legend: B rows, R response tokens.
"""

import torch

BLOCK = 1 << 16
"""Elements of a block: half a megabyte of float64."""


def row_blocks(rows_BR: torch.Tensor, size: int = BLOCK) -> list[slice]:
    """Slices of the rows, together all of them, of about `size` elements; one slice on another device than a processor."""
    num_rows = len(rows_BR)
    is_whole = rows_BR.device.type != "cpu" or not rows_BR.numel()
    step = max(num_rows if is_whole else size // (rows_BR.numel() // num_rows), 1)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def row_sums(values_BR: torch.Tensor) -> torch.Tensor:
    """float64 [B]: the sum of each row, added up in float64."""
    sums = [values_BR[rows].double().sum(1) for rows in row_blocks(values_BR)]
    return torch.cat(sums) if sums else values_BR.new_zeros(0, dtype=torch.float64)


def row_counts(mask_BR: torch.Tensor) -> torch.Tensor:
    """int64 [B]: True entries of each row of a bool mask."""
    # through bytes and floats, which torch adds up with vector instructions; exact below 2**24
    counts = [mask_BR[rows].view(torch.uint8).float().sum(1) for rows in row_blocks(mask_BR)]
    return torch.cat(counts).long() if counts else torch.zeros(0, dtype=torch.int64, device=mask_BR.device)
