"""docs/ranks.md: its commands are accepted as they stand, and the keys and files that it names exist."""

import re
import shlex
from pathlib import Path

import pytest

from asyncrl.config import TrainRun, keys_of, load_run, topology_of

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "ranks.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line) for line in re.findall(r"^\.venv/bin/asyncrl train (.+)$", PAGE, re.MULTILINE)]
IN_CODE = re.findall(r"`([^`\n]+)`", PAGE)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_runs_on_the_ranks_that_it_asks_for(words: list[str]) -> None:
    overrides = [word for word in words[1:] if not word.startswith("--")]
    topology = topology_of(load_run(TrainRun, ROOT / words[0], overrides))
    assert f"cluster.num_ranks={topology.world}" in overrides
    assert topology.dp == topology.world > 1


def test_every_key_of_the_page_exists() -> None:
    known = {key for key, _ in keys_of(TrainRun)}
    last_words = {key.rpartition(".")[2] for key in known}
    named = {code.partition(" = ")[0] for code in IN_CODE if re.fullmatch(r"[a-z_]+(\.[a-z_]+)*( = \S+)?", code)}
    keys = {name for name in named if name.split(".")[0] in TrainRun.model_fields and "." in name}
    assert len(keys) > 6
    assert keys <= known
    assert {"mixed_precision", "offload_policy", "reshard_after_forward"} <= named & last_words


def test_every_file_of_the_page_exists() -> None:
    files = re.findall(r"\]\(([\w/.]+)\)", PAGE)
    assert files
    assert [name for name in files if not (ROOT / "docs" / name).is_file()] == []
    assert all((ROOT / code).is_file() for code in IN_CODE if code.startswith("benchmarks/"))
