"""The learning-rate schedule by hand."""

import pytest

from asyncrl.config import OptimConfig
from asyncrl.training.optim import learning_rate


def _course(total: int, **options: object) -> list[float]:
    config = OptimConfig.model_validate({"lr": 1.0, **options})
    return [round(learning_rate(config, update, total), 6) for update in range(total + 2)]


def test_warm_up_then_line_to_the_floor_and_stays_there() -> None:
    assert _course(5, lr_warmup_steps=2, lr_scheduler_type="linear") == [0.5, 1.0, 1.0, 0.5, 0.0, 0.0, 0.0]


def test_cosine_meets_top_middle_and_floor() -> None:
    assert _course(5, lr_scheduler_type="cosine", min_lr_ratio=0.2)[::2] == [1.0, 0.6, 0.2, 0.2]


def test_constant_stays() -> None:
    assert _course(3, lr_warmup_steps=1) == [1.0] * 5


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_run_shorter_than_its_warm_up_has_a_rate(kind: str) -> None:
    assert _course(2, lr_warmup_steps=4, lr_scheduler_type=kind)[:2] == [0.25, 0.5]
