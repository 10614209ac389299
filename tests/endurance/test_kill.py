"""A few cycles of `kill_cycles.py`, which says what they are; `make endurance` makes five hundred."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_killed_processes_lose_nothing_acknowledged_and_leave_nothing_half_done() -> None:
    """In a process of its own: workers are forked, which needs a parent without threads."""
    script = Path(__file__).with_name("kill_cycles.py")
    command = [sys.executable, str(script), "--cycles", "20", "--seed", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout)
    assert counts["verified"] >= 10
    assert counts["acknowledged"] >= 100
