"""The shape of the repository: import contracts that bite, links, one name a module, and what no file may contain."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKS = {"asyncrl/agents": "../agents", "asyncrl/replay": "../replay", "asyncrl/tools": "../tools"}
PRODUCT = [path for room in ("asyncrl", "agents", "replay", "tools") for path in sorted((ROOT / room).rglob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
CONTROLLER = [
    path for path in PRODUCT if path.parts[len(ROOT.parts)] in ("agents", "replay") or path.name in ("feed.py", "trainer.py")
]


def _lint_imports(folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    # The folder first: its asyncrl, not the installed one.
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "300"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_import_contracts_hold() -> None:
    done = _lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


PLANTED = {
    "asyncrl/keys.py": "import asyncrl.config",  # upward, at the bottom
    "asyncrl/transfer_queue/store.py": "import asyncrl.replay.buffer",  # upward, through a link
    "asyncrl/rewards/rules.py": "import asyncrl.tools.calculator",  # sideways
    "asyncrl/replay/groups.py": "import time",
    "asyncrl/agents/token_builder.py": "import random",
    "asyncrl/feed.py": "from concurrent.futures import ThreadPoolExecutor",
    "asyncrl/stages/stage.py": "import threading",
    "asyncrl/algorithms/kl.py": "import asyncrl.ports",
    "asyncrl/replay/admission.py": "import asyncrl.rewards.rules",
}
FOUND = [
    "asyncrl.keys is not allowed to import asyncrl.config",
    "asyncrl.transfer_queue is not allowed to import asyncrl.replay",
    "asyncrl.rewards is not allowed to import asyncrl.tools",
    "asyncrl.replay is not allowed to import time",
    "asyncrl.agents is not allowed to import random",
    "asyncrl.feed is not allowed to import concurrent",
    "asyncrl.stages is not allowed to import threading",
    "asyncrl.algorithms is not allowed to import asyncrl.ports",
    "asyncrl.replay is not allowed to import asyncrl.rewards",
    "asyncrl.nowhere",  # a module without a place
]


def test_every_contract_catches_a_planted_violation(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "asyncrl", tmp_path / "asyncrl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "asyncrl" / "nowhere.py").write_text("")
    for name, line in PLANTED.items():
        with (tmp_path / name).open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")
    done = _lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    report = " ".join(done.stdout.split())
    assert [line for line in FOUND if line not in report] == []


def test_git_keeps_the_three_links() -> None:
    listed = subprocess.run(["git", "ls-files", "--stage", *LINKS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    modes = {line.split("\t")[1]: line.split()[0] for line in listed.splitlines()}
    assert modes == dict.fromkeys(LINKS, "120000")
    assert {name: os.readlink(ROOT / name) for name in LINKS} == LINKS


def test_no_module_is_loaded_under_two_names() -> None:
    code = """if True:
        import importlib, pkgutil, sys
        import asyncrl
        for found in pkgutil.walk_packages(asyncrl.__path__, "asyncrl."):
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:  # what runs inside vLLM can be loaded only there
                if error.name.split(".")[0] != "vllm":
                    raise
        files = {}
        for name, module in list(sys.modules.items()):
            if (path := getattr(module, "__file__", None)) and name != "__main__":
                files.setdefault(__import__("os").path.realpath(path), []).append(name)
        twice = [names for path, names in files.items() if len(names) > 1 and any("asyncrl" in name for name in names)]
        bare = [name for name in sys.modules if name.split(".")[0] in ("agents", "replay", "tools")]
        print(twice, bare)
    """
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "[] []\n", done.stderr


def test_the_distribution_lists_every_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = [path.parent for path in (ROOT / "asyncrl").glob("**/__init__.py")]
    folders += [path.parent for name in LINKS for path in (ROOT / name).glob("**/__init__.py")]
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(settings["packages"]) == packages


def test_every_package_says_what_it_is() -> None:
    silent = [path for path in PRODUCT if not re.match(r'(#!.*\n)?"""\S', path.read_text(encoding="utf-8"))]
    assert [str(path.relative_to(ROOT)) for path in silent] == []


def test_every_test_file_says_what_it_shows() -> None:
    silent = [path for path in TESTS if not path.read_text(encoding="utf-8").startswith('"""')]
    assert [str(path.relative_to(ROOT)) for path in silent] == []


def test_files_and_functions_stay_small() -> None:
    """400 lines a file, 60 a function: beyond it there is more than one subject inside."""
    found: list[str] = []
    for path in [*PRODUCT, *TESTS]:
        source, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        found += [f"{name}: {node.name}" for node in functions if (node.end_lineno or 0) - node.lineno >= 60]
        found += [name] if source.count("\n") > 400 else []
    assert found == []


MODELLED = {
    r"\basyncio\.sleep\(": ("asyncrl/simulation/", "asyncrl/waiting.py"),
    r"\bto_thread\(|\brun_in_executor\(": ("asyncrl/simulation/",),
    r"\bimport pickle\b|\bpickle\.\w": ("asyncrl/cluster/wire.py",),
}
"""In the models of the edges a sleep is what takes virtual time, and the loop refuses threads by their names; a back-off is one.
The wire to our own ranks is a socket pair without a name: what comes over it was written by this program, and is never stored."""
FORBIDDEN = {
    r"\btime\.sleep\(": "waiting is an event or a deadline",
    r"\basyncio\.sleep\(": "no sleep-polling; wait for a change",
    r"\bweights_only=False": "no pickle",
    r"\bimport pickle\b|\bpickle\.\w": "no pickle on any wire or disk",
    r"\bNotImplementedError\b": "no stubs",
    r"\b(TODO|FIXME|XXX)\b": "do it, or leave it out",
    r"\bto_thread\(|\brun_in_executor\(": "blocking work goes through world.offload",
    r"\basyncio\.create_task\(|\bensure_future\(|\bloop\.create_task\(": "a TaskGroup, or a line before: '# Not a TaskGroup: why'",
    r"/home/|/work/|/tmp/": "no machine paths",
}


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_no_file_contains(pattern: str) -> None:
    found = []
    for path in PRODUCT:
        before = ""
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if str(path.relative_to(ROOT)).startswith(MODELLED.get(pattern, ("-",))):
                continue
            if re.search(pattern, line) and "# Not a TaskGroup: " not in before:
                found.append(f"{path.relative_to(ROOT)}:{number} {line.strip()}")
            before = line
    assert found == [], FORBIDDEN[pattern]


def test_a_broad_except_raises_or_says_why_not() -> None:
    """Catching everything is for borders to the user's code and to threads; the line says so."""
    found = []
    for path in PRODUCT:
        source = path.read_text(encoding="utf-8")
        caught = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler) and _swallows_all(node)]
        lines = {node.lineno: source.splitlines()[node.lineno - 1] for node in caught}
        found += [f"{path.relative_to(ROOT)}:{number}" for number, line in lines.items() if not re.search(r"# \w+ \w+", line)]
    assert found == []


def _swallows_all(handler: ast.ExceptHandler) -> bool:
    broad = handler.type is None or ast.unparse(handler.type) in ("Exception", "BaseException")
    return broad and not any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def test_the_controller_never_asks_the_real_clock() -> None:
    assert len(CONTROLLER) > 10
    pattern = re.compile(
        r"\bdatetime\b|\bos\.urandom\b|\bdefault_rng\(\)|\brandom\.(rand|seed|shuffle|permutation|choice)\b|\bperf_counter\b|\bmonotonic\b"
    )
    found = [path for path in CONTROLLER if pattern.search(path.read_text(encoding="utf-8"))]
    assert [str(path.relative_to(ROOT)) for path in found] == []


def test_tests_are_no_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []
