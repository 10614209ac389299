"""A few kills of `kill_training.py`, which says what they are; `make endurance` makes more."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def killed(*arguments: str) -> dict[str, Any]:
    """In a process of its own: lives are forked, which needs a parent without threads."""
    script = Path(__file__).with_name("kill_training.py")
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    counts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return counts


@pytest.mark.long
@pytest.mark.parametrize("case", ["bound 0", "bound 2", "bound 2, calls end first"])
def test_killed_trainers_lose_nothing_and_train_on_nothing_twice(case: str) -> None:
    counts = killed("--kills", "6", "--seed", "7", "--case", case)
    assert counts["kills"] >= 6


@pytest.mark.long
def test_a_trainer_killed_at_a_border_ends_with_the_weights_of_one_that_was_not() -> None:
    counts = killed("--borders", "--kills", "5", "--seed", "8", "--case", "sync")
    assert counts["weights_compared"] == 5
    assert counts["kills"] >= 3  # one may pass less often than its reference did
