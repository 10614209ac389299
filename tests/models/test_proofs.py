"""The pages of the proofs say of the models what is so: which line is which rule, what breaks without it, and how to search."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from tests.models import run
from tests.models.admission import policies
from tests.models.recovery import variants

ROOT = Path(__file__).parents[2]
PROOFS = ROOT / "docs" / "proofs"
MODEL = ROOT / "tests" / "models" / "recovery"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(PROOFS.glob("*.md"))}


def rows(page: str, num_columns: int) -> list[list[str]]:
    lines = [line.strip("| ").split(" | ") for line in PAGES[page].splitlines() if line.startswith("| ")]
    return [line for line in lines if len(line) == num_columns]


def numbered(num_columns: int) -> dict[int, list[str]]:
    return {int(row[0]): row[1:] for row in rows("recovery", num_columns) if row[0].isdigit()}


def test_every_rule_is_on_the_page_once() -> None:
    assert list(numbered(5)) == list(range(1, 15))
    assert list(numbered(3)) == list(range(15, 21))


@pytest.mark.parametrize("rule", range(1, 15))
def test_a_rule_is_where_the_page_says(rule: int) -> None:
    places = re.findall(r"`(\w+\.py)::(\w+)`", numbered(5)[rule][1])
    assert places
    for file, name in places:
        source = (MODEL / file).read_text(encoding="utf-8")
        functions = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{file} has no {name}"


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def missing(text: str, folder: Path) -> list[str]:
    """Of the `file::function` and `file` of a text, those that are not in the folder."""
    places = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", text)
    assert places, text
    return [
        f"{file}::{name}"
        for file, name in places
        if not (folder / file).exists() or (name and name not in functions_of(folder / file))
    ]


@pytest.mark.parametrize("rule", range(1, 21))
def test_a_rule_is_in_the_product_where_the_page_says_and_has_its_test(rule: int) -> None:
    assert missing(numbered(5)[rule][2] if rule < 15 else numbered(3)[rule][1], ROOT / "asyncrl") == []
    tests = {name for path in (ROOT / "tests" / "recovery").glob("test_*rules.py") for name in functions_of(path)}
    assert [name for name in tests if name.startswith(f"test_rule_{rule:02}_")]


def test_the_rules_of_the_bound_are_in_the_product_where_the_page_says() -> None:
    found = [row for row in rows("staleness", 3) if "::" in row[1]]
    assert len(found) == 4
    for _, code, test in found:
        assert missing(code, ROOT / "asyncrl") + missing(test, ROOT) == []


@pytest.mark.parametrize("rule", range(1, 15))
def test_what_breaks_without_a_rule_is_what_the_page_says(rule: int) -> None:
    breaks = {variant.breaks for variant in variants.WRONG.values() if variant.rule == rule}
    assert set(numbered(5)[rule][3].split("; ")) == breaks


def test_the_wrong_policies_are_those_of_the_page() -> None:
    listed = {row[0]: row[1] for row in rows("staleness", 2) if row[0] in policies.WRONG}
    assert listed == {name: variant.breaks for name, variant in policies.WRONG.items()}


def test_the_number_of_variants_is_that_of_the_page() -> None:
    assert f"The {len(variants.WRONG)} wrong variants" in PAGES["recovery"]


def commands() -> list[list[str]]:
    blocks = [block for page in PAGES.values() for block in re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)]
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [[word for word in words if not re.match(r"[A-Z_]+=", word)] for words in lines]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_of_the_pages_would_run(words: list[str]) -> None:
    python, dash_m, module, *rest = words
    assert (python, dash_m) == (".venv/bin/python", "-m")
    if module == "pytest":
        assert [word for word in rest if not word.startswith("-") and not (ROOT / word).exists()] == []
        return
    assert module == "tests.models.run"
    part = run.arguments(rest).trace
    assert part is None or any(part in name for name in run.VARIANTS)


def test_a_page_stays_short() -> None:
    lengths = {name: len(text.splitlines()) for name, text in PAGES.items()}
    assert max(lengths.values()) <= 120, lengths
