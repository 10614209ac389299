"""The controller's own end: kill -9 at any moment leaves nothing, a script without a main guard works, no warning is given."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks
Gone = Callable[[Iterable[int]], None]
HEAD = """
import json, os, sys, torch
from asyncrl.cluster import RankGroup
sys.path.insert(0, os.path.dirname(os.path.abspath({here!r})))
print("script runs", flush=True)
group = RankGroup(2, "rank_targets:serve", timeout_s=60)
group.start(None)
placed, _ = group.arena.place({{"column": torch.zeros(1000)}}, {{"doubled": ((1000,), torch.float32)}})
group.call("double", placed)
with open(f"/proc/{{group.pids[0]}}/stat") as file:
    server = int(file.read().rpartition(")")[2].split()[1])
print(json.dumps([*group.pids, server]), flush=True)
"""


def _script(folder: Path, end: str) -> list[str]:
    file = folder / "script.py"
    file.write_text(HEAD.format(here=str(Path(__file__))) + end, encoding="utf-8")
    return [sys.executable, "-W", "error", str(file)]


@pytest.mark.parametrize("end", ["sys.stdin.read()", "group.call('wait')", "group.call('signal_in_compute', 1, 19)"])
def test_kill_9_of_the_controller_leaves_no_process(tmp_path: Path, wait_until_gone: Gone, end: str) -> None:
    """While the ranks are idle, in a call, and with one of them stopped."""
    command = _script(tmp_path, end)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "script runs\n"
        pids = json.loads(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        wait_until_gone(pids)
        assert process.stdout.read() == "", "the ranks ran the script again"


@pytest.mark.parametrize("end", ["group.close()", ""])
def test_a_script_without_a_guard_runs_once_and_warns_of_nothing(tmp_path: Path, wait_until_gone: Gone, end: str) -> None:
    """Without close() the interpreter's end is enough; it only says that sockets were left open."""
    environment = {**os.environ, "PYTHONWARNINGS": "error"}  # of the fork server and the ranks as well
    done = subprocess.run(_script(tmp_path, end), capture_output=True, text=True, env=environment, timeout=100, check=False)
    if end:
        assert done.stderr == ""
    first, pids = done.stdout.splitlines()
    assert first == "script runs"
    wait_until_gone(json.loads(pids))
