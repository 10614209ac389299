"""Learning-rate schedule: a pure function of the update's number, so that a checkpoint needs nothing but that number."""

import math

from asyncrl.config import OptimConfig


def learning_rate(config: OptimConfig, update: int, total_updates: int) -> float:
    """Rate of the `update`-th optimizer step, from 0. Linear from lr / warmup to lr over `lr_warmup_steps`, then the chosen course:
    constant, or down to `lr * min_lr_ratio` at the last of `total_updates` by a half cosine or a line.

    lr 1, warm-up 2, linear, total 5, floor 0: 0.5, 1.0, 1.0, 0.5, 0.0. Past the end the rate stays at the floor.
    """
    if update < config.lr_warmup_steps:
        return config.lr * (update + 1) / config.lr_warmup_steps
    if config.lr_scheduler_type == "constant":
        return config.lr
    span = max(total_updates - 1 - config.lr_warmup_steps, 1)
    progress = min((update - config.lr_warmup_steps) / span, 1.0)
    fall = 1 - progress if config.lr_scheduler_type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * fall)
