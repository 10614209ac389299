"""The user's own modules: found in the working directory whatever the module path says, and refused in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.agents.registry import load_agent_loop
from asyncrl.errors import ConfigError, ToolSpecError
from asyncrl.tools import load_tools

TOOL = '''
def shout_{name}(text: str) -> str:
    """Shout."""
    import neighbour_{name}
    return neighbour_{name}.loud(text)
'''
LOOPS = """
class Fine:
    async def run(self, prompt, context): ...
class Raises:
    def __init__(self): raise ValueError("bad\\nthing")
class NotAsync:
    def run(self, prompt, context): ...
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules of the user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in {"raises": 'raise RuntimeError("a\\nb")', "leaves": "raise SystemExit(4)", "no_python": "def ("}.items():
        (tmp_path / f"uc_{name}.py").write_text(text, encoding="utf-8")
    (tmp_path / "uc_loops.py").write_text(LOOPS, encoding="utf-8")
    return tmp_path


def test_a_tool_beside_the_run_is_found_with_what_it_imports_later(tmp_path: Path) -> None:
    (tmp_path / "uc_tool.py").write_text(TOOL.format(name="a"), encoding="utf-8")
    (tmp_path / "neighbour_a.py").write_text("loud = str.upper", encoding="utf-8")
    (tmp_path / "random.py").write_text("raise RuntimeError('shadowed')", encoding="utf-8")
    code = """if True:
        from asyncrl.tools import load_tools
        tool = load_tools(["uc_tool:shout_a"])["shout_a"]
        import random
        print(tool.call({"text": "hi"}, {}))
    """
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "HI", done.stderr


@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("uc_raises", "importing uc_raises raised RuntimeError: a b"),
        ("uc_leaves", "importing uc_leaves raised SystemExit: 4"),
        ("uc_no_python", "importing uc_no_python raised SyntaxError"),
        ("uc_nothing", "no module named 'uc_nothing' in "),
    ],
)
def test_a_module_that_does_not_import_is_told_in_one_line(here: Path, module: str, named: str) -> None:
    with pytest.raises(ToolSpecError) as tool_error:
        load_tools([f"{module}:tool"])
    with pytest.raises(ConfigError) as loop_error:
        load_agent_loop(f"{module}:Loop")
    for key, error in (("agent.tools", tool_error.value), ("agent.name", loop_error.value)):
        assert key in str(error)
        assert named in str(error)
        assert "\n" not in str(error)


def test_an_agent_loop_beside_the_run_is_found(here: Path) -> None:
    assert type(load_agent_loop("uc_loops:Fine")).__name__ == "Fine"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("uc_loops:Raises", "cannot be made without arguments: ValueError: bad thing"),
        ("uc_loops:Nothing", "has no 'Nothing'"),
        ("uc_loops:NotAsync", "has no `async def run(prompt, context)`"),
        ("tool_agnt", "did you mean tool_agent? (built in: single_turn, tool_agent; your own: module:Class)"),
    ],
)
def test_an_agent_loop_that_cannot_be_used_is_told_in_one_line(here: Path, name: str, named: str) -> None:
    with pytest.raises(ConfigError, match=r"agent\.name") as error:
        load_agent_loop(name)
    assert named in str(error.value)
    assert "\n" not in str(error.value)
