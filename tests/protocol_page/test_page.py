"""docs/data-protocol.md is that of the code: its parts are as they would be written now, its prose names what there is."""

import ast
import re
import runpy
import shutil
from pathlib import Path

import pytest

from asyncrl.fields import TAGS
from asyncrl.protocol_page import BLOCKS, fill
from asyncrl.protocol_page.lives import READS, verbs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data-protocol.md").read_text(encoding="utf-8")
PROSE = re.sub(r"<!-- generated: .*?<!-- end -->", "", PAGE, flags=re.DOTALL)


def test_the_generated_parts_are_those_of_the_code() -> None:
    assert fill(PAGE) == PAGE, "run `make docs`"


def test_every_part_stands_on_the_page_once() -> None:
    assert sorted(re.findall(r"<!-- generated: (\S+) -->", PAGE)) == sorted(BLOCKS)
    assert PAGE.count("<!-- end -->") == len(BLOCKS)


def test_filling_leaves_the_prose_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCKS, "a", lambda: "| x |")
    page = "before\n<!-- generated: a -->\n<!-- end -->\nbetween\n<!-- generated: a -->\n\nold\n\n<!-- end -->\nafter\n"
    part = "<!-- generated: a -->\n\n| x |\n\n<!-- end -->\n"
    assert fill(page) == f"before\n{part}between\n{part}after\n"
    with pytest.raises(KeyError, match="unheard"):
        fill("<!-- generated: unheard -->\n<!-- end -->\n")


def test_the_script_writes_both_pages(tmp_path: Path) -> None:
    """What `make docs` runs, in a copy: nothing is left to do, and what was spoiled is mended."""
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (docs / "configuration.md").write_text("spoiled", encoding="utf-8")
    (docs / "data-protocol.md").write_text(PAGE.replace("| `prompts` |", "| `spoiled` |"), encoding="utf-8")
    runpy.run_path(str(docs / "generate.py"), run_name="__main__")
    for name in ("configuration.md", "data-protocol.md"):
        assert (docs / name).read_text(encoding="utf-8") == (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_every_test_that_the_prose_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PROSE)
    assert len(named) >= 4
    for file, test in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}, file


def test_every_verb_is_on_the_page() -> None:
    assert [verb for verb in verbs() if f"| `{verb}` |" not in PAGE] == []
    assert set(READS) < set(verbs())


def test_code_words_of_the_prose_are_names_of_the_project() -> None:
    """Identifiers in backticks: of a field, tag, verb, key, class or module; whatever else is meant is listed here."""
    source = "\n".join(
        path.read_text(encoding="utf-8") for room in ("asyncrl", "agents", "replay") for path in (ROOT / room).rglob("*.py")
    )
    other = {
        "a1b2",
        "a1b2_0",
        "a1b2_0_0",
        "uid_session",
        "uid_session_index",
        "seed",
        "source",
        "tested",
        "design",
        "none",
        "tests",
    }
    words = set(re.findall(r"`([a-zA-Z_][\w.]*)`", PROSE)) - other - TAGS.keys()
    assert [word for word in sorted(words) if not re.search(rf"\b{re.escape(word.rpartition('.')[2])}\b", source)] == []
