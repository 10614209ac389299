"""[reward]: each manager needs what it needs, what it does not read is refused, and secrets stay out of the configuration."""

import subprocess
import sys
import tomllib
from typing import Any

import pytest

from asyncrl.config import TrainRun, parse_run, to_toml
from asyncrl.errors import ConfigError

JUDGE = {"manager": "judge", "judge": {"base_url": "http://localhost:8000/v1/", "model": "m"}}


def parse(reward: dict[str, Any], **sections: dict[str, Any]) -> TrainRun:
    data = {"train_files": "rows.jsonl", "max_response_length": 4096}
    return parse_run(TrainRun, {"data": data, "model": {"path": "model"}, "reward": reward, **sections}, where="run.toml")


def with_judge(**keys: object) -> dict[str, Any]:
    return {**JUDGE, "judge": {**JUDGE["judge"], **keys}}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"manager": "dapo"}, 'reward.manager = "dapo" needs reward.overlong_buffer_len, such as a fifth of'),
        (
            {"manager": "dapo", "overlong_buffer_len": 5000},
            "reward.overlong_buffer_len = 5000 is more than data.max_response_length = 4096: the penalty would begin at "
            "4096 - 5000 = -904 tokens",
        ),
        ({"manager": "dapo", "overlong_buffer_len": -1}, "reward.overlong_buffer_len = -1: input should be greater"),
        ({"manager": "dapo", "overlong_buffer_len": 1, "overlong_penalty_factor": 0}, "reward.overlong_penalty_factor = 0: "),
        ({"manager": "gdpo"}, 'reward.manager = "gdpo" needs algorithm.gdpo_reward_keys (of algorithm.adv_estimator = "gdpo")'),
        ({"manager": "rate_limited"}, 'reward.manager = "rate_limited" limits nothing: set reward.limits.max_concurrent, '),
        (
            {"manager": "rate_limited", "limits": {"max_tpm": 1999}},
            "reward.limits.max_tpm = 1999 is less than reward.limits.estimated_tokens_per_request = 2000: not one call would",
        ),
        ({"manager": "judge", "judge": {"model": "m"}}, 'reward.manager = "judge" needs reward.judge.base_url'),
        ({"manager": "judge", "judge": {"base_url": "http://h"}}, 'reward.manager = "judge" needs reward.judge.model'),
        ({**JUDGE, "limits": {"max_tpm": 1}}, "reward.limits.max_tpm = 1 is less than"),
        ({**JUDGE, "function": "gsm8k"}, 'reward.function has no effect because reward.manager is "judge"'),
        ({"overlong_buffer_len": 5}, 'reward.overlong_buffer_len has no effect because reward.manager is not "dapo"'),
        ({"limits": {"max_rpm": 5}}, "reward.limits.max_rpm has no effect because reward.manager is not"),
        ({"judge": {"model": "m"}}, 'reward.judge.model has no effect because reward.manager is not "judge"'),
        ({"manager": "dappo"}, "reward.manager = 'dappo': input should be 'naive', 'dapo', 'gdpo', 'rate_limited' or 'judge'"),
        (with_judge(base_url="localhost:8000"), "reward.judge.base_url: 'localhost:8000' is no address of the form http://"),
        (with_judge(base_url="ftp://localhost"), "reward.judge.base_url: 'ftp://localhost' is no address of the form http://"),
        (with_judge(base_url="http://"), "reward.judge.base_url: 'http://' is no address of the form http://"),
        (with_judge(base_url="http://h:x/v1"), "reward.judge.base_url: 'http://h:x/v1' is no address of the form http://"),
        (with_judge(base_url="http://a host/v1"), "reward.judge.base_url: 'http://a host/v1' is no address of the form http://"),
        (
            with_judge(base_url="http://h/v1/chat/completions/"),
            "reward.judge.base_url: 'http://h/v1/chat/completions/': leave out /chat/completions, which is added to it",
        ),
        (with_judge(base_url="http://h:0/v1"), "reward.judge.base_url: 'http://h:0/v1' is no address of the form http://"),
    ],
)
def test_what_a_manager_needs_and_does_not_read(reward: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(reward)
    assert str(caught.value).startswith(f"run.toml: {message}")


@pytest.mark.parametrize(
    "url", ["http://me:hidden@host/v1", "http://hidden@host/v1", "https://host/v1?key=hidden", "https://host/#hidden"]
)
def test_an_address_with_a_secret_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError, match="a key goes into the variable that api_key_env names") as caught:
        parse(with_judge(base_url=url))
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("name", ["sk-hidden", "hidden key", "1hidden", "$HIDDEN"])
def test_a_key_in_place_of_its_variable_is_refused_without_repeating_it(name: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.judge\.api_key_env: give the name of an environment variable") as caught:
        parse(with_judge(api_key_env=name))
    assert "hidden" not in str(caught.value).lower()


@pytest.mark.parametrize(
    ("reward", "sections"),
    [
        ({"manager": "dapo", "overlong_buffer_len": 4096}, {}),
        ({"manager": "gdpo"}, {"algorithm": {"adv_estimator": "gdpo", "gdpo_reward_keys": ["format"]}}),
        ({"manager": "rate_limited", "limits": {"max_tpm": 2000}}, {}),
        ({"manager": "rate_limited", "limits": {"max_concurrent": 1, "queue_timeout_s": 1}}, {}),
        (JUDGE, {}),
        ({**JUDGE, "limits": {"max_rpm": 60}}, {}),
    ],
)
def test_the_resolved_configuration_of_each_manager_loads_again(reward: dict[str, Any], sections: dict[str, Any]) -> None:
    run = parse(reward, **sections)
    resolved = tomllib.loads(to_toml(run))
    assert parse_run(TrainRun, resolved) == run
    assert ("limits" in resolved["reward"]) == (run.reward.manager in ("rate_limited", "judge"))
    assert ("judge" in resolved["reward"]) == (run.reward.manager == "judge")


def test_the_address_is_kept_without_a_slash_at_its_end() -> None:
    assert parse(JUDGE).reward.judge.base_url == "http://localhost:8000/v1"


def test_the_configuration_and_the_scorer_of_a_function_load_no_aiohttp() -> None:
    code = "import sys, asyncrl.config, asyncrl.rewards.scoring; print('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
