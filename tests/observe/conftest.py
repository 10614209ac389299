"""A run's folder, and lines of metrics in it."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from asyncrl.observe.metrics import MetricsLog
from asyncrl.observe.run_folder import RunFolder, create_run_folder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return create_run_folder(tmp_path, "run")


@pytest.fixture
def log_steps(tmp_path: Path) -> Callable[..., RunFolder]:
    """log_steps(name, {step: metrics}): the folder of a run with these metrics."""

    def log_steps(name: str, steps: Mapping[int, Mapping[str, float]]) -> RunFolder:
        made = create_run_folder(tmp_path, name)
        with MetricsLog(made) as log:
            for step, metrics in steps.items():
                log.log(step, metrics)
        return made

    return log_steps
