"""Every way in which `reward.function` can be wrong is one line at open, and leaves no process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config import RewardConfig
from asyncrl.errors import RewardSpecError
from asyncrl.rewards.scoring import check_function
from asyncrl.world import RealWorld

Project = Callable[[str], Path]


@pytest.mark.parametrize(
    ("function", "source", "message"),
    [
        ("gsm8", "", "neither a rule (exact_match, gsm8k) nor module:function; did you mean gsm8k?"),
        ("zzz", "", "neither a rule"),
        ("my_rewards.score", "", "nor module:function"),
        ("my_rewards:", "", "not of the form module:function"),
        (":score", "", "not of the form module:function"),
        ("my-rewards:score", "", "not of the form module:function"),
        ("no_such_module:score", "", "no module named 'no_such_module'"),
        ("my_rewards.sub:score", "", "no module named 'my_rewards.sub'"),
        ("my_rewards:scor", "def score(**k): return 1", "has no 'scor'; did you mean score?"),
        ("my_rewards:score", "score = 3", "is int, not a function"),
        ("my_rewards:score", "def score(text): return 1", "cannot be called with (data_source, solution_str, ground_truth"),
        ("my_rewards:score", "def score(data_source, solution_str, ground_truth, extra_info, more): ...", "argument: 'more'"),
        ("my_rewards:score", "import no_such_library", "raised ModuleNotFoundError: No module named 'no_such_library' (my_rewards"),
        ("my_rewards:score", "def score(:", "raised SyntaxError: invalid syntax"),
        (
            "my_rewards:score",
            "1 / 0",
            "raised ZeroDivisionError: division by zero (my_rewards.py:2 in <module>)",
        ),
        ("my_rewards:score", "sys.exit(3)", "raised SystemExit: 3"),
        ("my_rewards:score", "os._exit(3)", "while importing, the reward worker ended with exit code 3"),
        ("my_rewards:score", "os.kill(os.getpid(), 11)", "was ended by signal 11 (SIGSEGV)"),
    ],
)
async def test_a_function_that_cannot_be_used_is_one_line_at_open(
    project: Project, function: str, source: str, message: str
) -> None:
    project(source)
    async with RealWorld() as world:
        with pytest.raises(RewardSpecError) as caught:
            await check_function(RewardConfig(function=function, num_workers=3), world=world)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"reward.function = {function!r}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "def score(data_source, solution_str, ground_truth, extra_info=None): return 1",
        "def score(solution_str, **kwargs): return 1",
        "class Score:\n    def __call__(self, solution_str, **kwargs): return 1\nscore = Score()",
        "import functools\ndef base(x, **kwargs): return x\nscore = functools.partial(base, 1)",
        "async def score(**kwargs): return 1",
        "class Score:\n    async def __call__(self, **kwargs): return 1\nscore = Score()",
        "print('hello from import'); os.write(1, b'raw')\ndef score(**kwargs): return 1",
    ],
)
async def test_a_function_that_can_be_used_passes(project: Project, source: str) -> None:
    project(source)
    async with RealWorld() as world:
        await check_function(RewardConfig(function="my_rewards:score"), world=world)


async def test_a_method_in_a_package_of_the_working_directory(project: Project, tmp_path: Path) -> None:
    project("")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").touch()
    (tmp_path / "pack/inner.py").write_text("class Rules:\n    @staticmethod\n    def score(**kwargs): return 1\n")
    async with RealWorld() as world:
        await check_function(RewardConfig(function="pack.inner:Rules.score"), world=world)
