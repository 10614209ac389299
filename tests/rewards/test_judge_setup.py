"""A judge that cannot be used is one line before the run; the judge itself is not asked."""

import asyncio
import subprocess
import sys

import pytest

from asyncrl.config import JudgeConfig, RewardConfig
from asyncrl.errors import RewardSpecError
from asyncrl.rewards.scoring import check_function
from asyncrl.world import RealWorld


async def test_the_check_before_a_run_asks_nobody() -> None:
    async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pytest.fail("the judge was asked")

    async with await asyncio.start_server(asked, "127.0.0.1", 0) as server, RealWorld() as world:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        await check_function(RewardConfig(manager="judge", judge=JudgeConfig(base_url=url, model="m")), world=world)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "reward.judge.api_key_env = 'JUDGE_KEY': there is no such environment variable, or it is empty"),
        ("", "reward.judge.api_key_env = 'JUDGE_KEY': there is no such environment variable, or it is empty"),
        ("sk-hidden\nX-Other: 1", "reward.judge.api_key_env = 'JUDGE_KEY': its value is no key"),
        ("sk-hidden and more", "reward.judge.api_key_env = 'JUDGE_KEY': its value is no key"),
        ("sk-hidden-ü", "reward.judge.api_key_env = 'JUDGE_KEY': its value is no key"),
    ],
)
async def test_a_key_that_is_none_is_one_line_of_the_user(monkeypatch: pytest.MonkeyPatch, value: str | None, message: str) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    judge = JudgeConfig(base_url="http://127.0.0.1:1/v1", model="m", api_key_env="JUDGE_KEY")
    async with RealWorld() as world:
        with pytest.raises(RewardSpecError) as caught:
            await check_function(RewardConfig(manager="judge", judge=judge), world=world)
    assert str(caught.value).startswith(message)
    assert "hidden" not in str(caught.value)


WITHOUT_AIOHTTP = """if True:
    import asyncio, sys
    sys.modules["aiohttp"] = None  # as Python marks what cannot be imported
    from asyncrl.config import JudgeConfig, RewardConfig
    from asyncrl.errors import UserError
    from asyncrl.rewards.scoring import check_function
    from asyncrl.world import RealWorld

    async def main():
        async with RealWorld() as world:
            await check_function(RewardConfig(manager="judge", judge=JudgeConfig(base_url="http://h/v1", model="m")), world=world)

    try:
        asyncio.run(main())
    except UserError as error:
        print(error)
        sys.exit(error.exit_code)
"""


def test_without_aiohttp_one_line_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_AIOHTTP], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == "reward.manager = \"judge\" needs aiohttp, which is not installed: pip install 'asyncrl[judge]'\n"
