"""The pages of the project point at what exists."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_in_code_exist(page: Path) -> None:
    """Words in backticks that look like files of ours."""
    named = re.findall(
        r"`((?:asyncrl|agents|replay|tools|tests|configs|benchmarks|docs)/[\w./-]+)(?:::\w+)?`", page.read_text(encoding="utf-8")
    )
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []


def test_every_proof_of_a_guarantee_exists() -> None:
    rows = re.findall(
        r"\| `(tests/[\w/]+\.py)(?:::(\w+))?` \|$", (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) > 15
    for file, test in rows:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        names = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
        assert not test or test in names, f"{file}::{test}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "decisions").glob("*.md")), ids=lambda path: path.name)
def test_a_decision_is_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 30


def test_the_constraints_pin_every_requirement() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *(name for extra in project["optional-dependencies"].values() for name in extra)]
    # vLLM's CPU build has another name, and an environment of its own (constraints-vllm.txt).
    wanted = {re.split(r"[^\w.-]", text)[0].lower() for text in requirements} - {"asyncrl", "vllm"}
    assert {"torch", "tensordict", "transformers", "pytest", "ruff"} <= wanted
    assert wanted - names == set()
    assert [pin for pin in pins.values() if "+" in pin] == [], "a local part would bind users to one build"


def test_make_targets_all_set_up_first() -> None:
    """Every target but help, setup and ci depends on the stamp of an environment."""
    rules = re.findall(r"^([a-z]+):(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rules) >= 8
    stamps = ("$(READY)", "$(VLLM_READY)")
    assert [
        name for name, rest in rules if name not in ("help", "setup", "ci") and not any(stamp in rest for stamp in stamps)
    ] == []


def test_make_passes_pips_variables_on() -> None:
    """A dry run shows what would run; the Makefile neither sets nor clears PIP_*."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert not re.search(r"^\s*(export\s+|unexport\s+)?PIP_\w+\s*[:?]?=", makefile, re.MULTILINE)
    done = subprocess.run(["make", "-n", "-W", "pyproject.toml", "setup"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "-m pip install" in done.stdout
    assert "--index-url" not in done.stdout


def test_pre_commit_hooks_are_local() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"- repo: (\S+)", hooks) == ["local"]
    assert set(re.findall(r"entry: \.venv/bin/(\S+)", hooks)) == {"ruff", "mypy", "lint-imports"}
