"""The section [reward]: every key of it, and what must hold between them. Loads neither aiohttp nor a reward function."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from asyncrl.config.addresses import Variable, plain_url
from asyncrl.config.sections import Count, Positive, Seconds, Section, Threads
from asyncrl.errors import ConfigError


def _chat_url(url: str) -> str:
    """Raises ConfigError, as `plain_url`."""
    if url.rstrip("/").endswith("/chat/completions"):
        raise ConfigError(f"{url!r}: leave out /chat/completions, which is added to it")
    return plain_url(url)


class LimitsConfig(Section):
    """Limits on calls, kept for `rate_limited` and `judge`. A call waits in line, first come first served."""

    max_concurrent: Count = 0
    """Calls at once. 0: no limit."""
    max_rpm: Count = 0
    """Calls that begin in any 60 seconds; each attempt of the judge is one. 0: no limit."""
    max_tpm: Count = 0
    """Tokens of the calls that begin in any 60 seconds, by `estimated_tokens_per_request`. 0: no limit."""
    estimated_tokens_per_request: Positive = 2000
    """Tokens that one call counts for."""
    queue_timeout_s: Seconds = 300.0
    """Seconds that a call may wait for its place; afterwards its session fails."""

    @property
    def are_set(self) -> bool:
        """Is there a limit at all?"""
        return bool(self.max_concurrent or self.max_rpm or self.max_tpm)


class JudgeConfig(Section):
    """The model that `judge` asks, behind an OpenAI-compatible endpoint."""

    base_url: Annotated[str, AfterValidator(_chat_url)] = ""
    """Address of the endpoint without `/chat/completions`, such as http://localhost:8000/v1."""
    model: str = ""
    """Name of the model there."""
    prompt: str = ""
    """File with a Jinja template of the message; it sees the arguments of a reward function and response_len. Empty: built in."""
    max_tokens: Positive = 512
    """Tokens of the verdict at most; one that is cut off is an error."""
    api_key_env: Variable = ""
    """Name of the environment variable that holds the key. Empty: none is sent."""
    max_attempts: Positive = 4
    """Tries of one call: again after a lost connection, 429 and 5xx, within reward.timeout_s."""


class RewardConfig(Section):
    """How a finished session is scored."""

    manager: Literal["naive", "dapo", "gdpo", "rate_limited", "judge"] = "naive"
    """`naive`: one function; `dapo`: less an over-long penalty; `gdpo`: with components; `rate_limited`; `judge`: a model."""
    function: str = "exact_match"
    """Rule: `exact_match`, `gsm8k`, or `module:function` called as f(data_source, solution_str, ground_truth, extra_info)."""
    timeout_s: Seconds = 30.0
    """Deadline of one scoring, waiting in line aside; a worker that exceeds it is killed and the session fails."""
    num_workers: Threads = 1
    """Processes that run sync reward functions."""
    overlong_buffer_len: Count = 0
    """Of `dapo`: the last tokens of data.max_response_length, over which the penalty grows from 0 to the whole."""
    overlong_penalty_factor: Annotated[float, Field(gt=0)] = 1.0
    """Of `dapo`: the whole penalty, at data.max_response_length and beyond."""
    limits: LimitsConfig = LimitsConfig()
    """Limits on calls."""
    judge: JudgeConfig = JudgeConfig()
    """The judge."""


def check_reward(reward: RewardConfig, *, max_response_length: int, components: list[str]) -> None:
    """Does the manager have what it needs? components: `algorithm.gdpo_reward_keys`. Raises ConfigError."""
    if reward.manager == "dapo":
        _check_buffer(reward.overlong_buffer_len, max_response_length)
    if reward.manager == "gdpo" and not components:
        raise ConfigError('reward.manager = "gdpo" needs algorithm.gdpo_reward_keys (of algorithm.adv_estimator = "gdpo")')
    if reward.manager == "rate_limited" and not reward.limits.are_set:
        raise ConfigError(
            'reward.manager = "rate_limited" limits nothing: set reward.limits.max_concurrent, reward.limits.max_rpm or '
            "reward.limits.max_tpm"
        )
    if reward.manager in ("rate_limited", "judge"):
        _check_tokens(reward.limits)
    if reward.manager == "judge":
        for key in ("base_url", "model"):
            if not getattr(reward.judge, key):
                raise ConfigError(f'reward.manager = "judge" needs reward.judge.{key}')


def _check_buffer(buffer: int, limit: int) -> None:
    if not buffer:
        raise ConfigError('reward.manager = "dapo" needs reward.overlong_buffer_len, such as a fifth of data.max_response_length')
    if buffer > limit:
        raise ConfigError(
            f"reward.overlong_buffer_len = {buffer} is more than data.max_response_length = {limit}: the penalty would begin at "
            f"{limit} - {buffer} = {limit - buffer} tokens"
        )


def _check_tokens(limits: LimitsConfig) -> None:
    if 0 < limits.max_tpm < limits.estimated_tokens_per_request:
        raise ConfigError(
            f"reward.limits.max_tpm = {limits.max_tpm} is less than reward.limits.estimated_tokens_per_request = "
            f"{limits.estimated_tokens_per_request}: not one call would ever begin"
        )
