"""Every command of the README is one that CI runs, or one that the command line accepts as it stands."""

import os
import re
import shlex
from pathlib import Path

import pytest
import typer

from asyncrl.cli import app
from asyncrl.config import SFTRun, TrainRun, load_run, parse_run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKE_IN_CI = {*re.findall(r"^make (\w+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)}
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def _fenced(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def _commands() -> list[list[str]]:
    """Words of each shell line, without variables set in front; and of each inline `make ...` or `asyncrl ...`."""
    lines = [line for block in _fenced("sh") for line in block.splitlines() if line.strip()]
    lines += re.findall(r"`((?:make|asyncrl) [^`]+)`", README)
    return [[word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)] for line in lines]


COMMANDS = _commands()


def test_there_are_commands_to_check() -> None:
    programs = {Path(words[0]).name for words in COMMANDS}
    assert programs == {"make", "asyncrl"}, "any other program needs a check of its own here"


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] == "make"], ids=" ".join)
def test_a_make_target_is_one_that_ci_runs(words: list[str]) -> None:
    # What sets up comes before what needs it; `ci` is .ci/run itself.
    assert set(words[1:]) <= MAKE_IN_CI | {"setup", "setup-vllm", "ci"}
    assert set(words[1:]) <= set(TARGETS)


@pytest.mark.parametrize("words", [words for words in COMMANDS if Path(words[0]).name == "asyncrl"], ids=" ".join)
def test_a_command_is_accepted_by_the_command_line(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    group = typer.main.get_group(app)
    with group.make_context("asyncrl", words[1:]) as context:
        name, command, rest = group.resolve_command(context, words[1:])
        assert command is not None
        with command.make_context(name, rest, parent=context) as parsed:
            config = parsed.params.get("config")
            overrides = parsed.params.get("overrides") or []
    if config and name == "sft":
        load_run(SFTRun, Path(config), overrides)
    elif config:
        load_run(TrainRun, Path(config), overrides)


def test_the_command_of_a_wrong_option_would_be_refused() -> None:
    with pytest.raises(Exception, match="No such option"):
        typer.main.get_group(app).commands["train"].make_context("train", ["run.toml", "--nonsense"])


@pytest.mark.parametrize("text", _fenced("toml"))
def test_an_example_configuration_is_a_valid_one(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    load_run(TrainRun, path)


def test_every_file_of_the_map_exists() -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|$", README, re.MULTILINE)
    assert len(rows) > 10
    for places, words in rows:
        folder = ROOT
        for place in re.findall(r"`([^`]+)`", places):
            # `asyncrl/keys.py` `fields.py`: a bare name lies beside the one before it
            path = ROOT / place if "/" in place and (ROOT / place).exists() else folder / place
            assert path.exists(), place
            folder = path.parent
        assert len(words.split()) <= 8, f"{places}: {words}"


def test_the_map_has_every_room_and_module() -> None:
    rows = "\n".join(re.findall(r"^\| (`.*?) \|", README, re.MULTILINE))
    named = {name.strip("/").rpartition("/")[2] for name in re.findall(r"`([^`]+)`", rows)}
    here = {path.name for path in (ROOT / "asyncrl").iterdir() if not path.name.startswith(("_", "py.typed"))}
    assert here - named == set()


def test_ci_runs_the_readmes_commands() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert {"test", "lint", "types", "train"} <= MAKE_IN_CI


def test_the_smallest_run_of_the_readme_needs_no_other_section() -> None:
    parse_run(TrainRun, {"data": {"train_files": "x"}, "model": {"path": "y"}})
