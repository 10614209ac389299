"""Every command of docs/tracing.md runs as it stands, and what loads is no torch."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.observe.run_folder import create_run_folder
from asyncrl.observe.trace_file import Record, TraceLog

PAGE = (Path(__file__).parents[2] / "docs" / "tracing.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


@pytest.fixture(autouse=True)
def _quickstart(tmp_path: Path, make_record: Callable[..., Record], monkeypatch: pytest.MonkeyPatch) -> None:
    """The run of the page, in the folder that commands run in."""
    monkeypatch.chdir(tmp_path)
    TraceLog(create_run_folder("runs", "quickstart").trace).append(make_record(20, "2707675a43292a56"))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_of_the_page_runs(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert exited.value.code == 0, capsys.readouterr().err
    assert capsys.readouterr().out or Path("trace.json").stat().st_size


def test_the_page_shows_every_format() -> None:
    assert len(COMMANDS) == 4
    assert {words[words.index("--format") + 1] for words in COMMANDS if "--format" in words} == {"jsonl", "perfetto"}


def test_a_trace_is_shown_without_torch() -> None:
    code = "import sys; from asyncrl import cli\ntry: cli.main()\nfinally: assert 'torch' not in sys.modules, 'torch was loaded'"
    done = subprocess.run([sys.executable, "-c", code, "trace", "runs/quickstart"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("group 2707675a43292a56")
