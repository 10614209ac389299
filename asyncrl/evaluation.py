"""Evaluation: sampled and greedy sessions on held-out rows, scored by the run's own reward.

engine (one pinned version) -> sessions -> [evaluation] -> eval/sampled/*, eval/greedy/*

Pinned: every token of every session was sampled by the version that is measured, or there is no number at all. Nothing is written
to the TransferQueue. A session that failed is no answer: it is counted in `failed` and left out of every mean, never scored 0.
Seeds depend on the row, not on the step, so two evaluations differ by their weights alone.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.agents.loop import AgentLoopOutput
from asyncrl.agents.session import SessionParts, SessionResult, run_session
from asyncrl.config import EvalConfig, TrainRun
from asyncrl.dataset import to_prompt
from asyncrl.errors import EvaluationError
from asyncrl.ports import Prompt, Rows, SamplingParams

SESSIONS_A_SLOT = 4
"""A session that waits for a tool leaves its slot to others."""
SUCCESS_SCORE = 1.0
"""A trajectory succeeds when its score is at least this, the full mark of the built-in rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way of decoding: `name` is the middle of the metric names."""

    name: str
    sampling: SamplingParams
    n: int


def modes_of(config: EvalConfig) -> tuple[Mode, ...]:
    """The modes that the configuration asks for."""
    sampled = Mode(name="sampled", sampling=SamplingParams(temperature=config.temperature), n=config.n)
    greedy = Mode(name="greedy", sampling=SamplingParams(temperature=0.0), n=1)
    return tuple(mode for mode, wanted in ((sampled, config.sampled), (greedy, config.greedy)) if wanted)


def eval_prompts(rows: Rows) -> list[Prompt]:
    """One prompt a row; its uid is `val-<position>`."""
    return [to_prompt(rows[position], uid=f"val-{position}", global_steps=0) for position in range(len(rows))]


async def evaluate(prompts: Sequence[Prompt], mode: Mode, parts: SessionParts, *, version: int) -> dict[str, float]:
    """Run `mode.n` sessions a prompt and return `eval/<mode>/*`: success, score, tool_share, num_turns, response_length, failed.

    version: of the weights that are measured. tool_share: trajectories that called a tool. Each session has the deadline of the
    configuration, from when it gets its turn. Raises EvaluationError when every session failed, with the first reason, and when a
    session was sampled by another version.
    """
    places = asyncio.Semaphore(_sessions_at_once(parts.run))

    async def run_in_turn(prompt: Prompt, number: int) -> SessionResult:
        async with places:  # bounded: each holder has a deadline
            return await run_session(prompt, number, parts)

    async with asyncio.TaskGroup() as sessions:
        tasks = [sessions.create_task(run_in_turn(prompt, number)) for prompt in prompts for number in range(mode.n)]
    results = [task.result() for task in tasks]
    outputs = [output for result in results for output in result.outputs]
    _check_pinned(results, mode, version)
    if not outputs:
        raise EvaluationError(f"all {len(results)} sessions of the {mode.name} evaluation failed; the first: {results[0].failure}")
    return {f"eval/{mode.name}/{name}": value for name, value in _numbers(outputs, results).items()}


def _check_pinned(results: Sequence[SessionResult], mode: Mode, version: int) -> None:
    for position, result in enumerate(results):
        for output in result.outputs:
            sampled = {number for number, is_policy in zip(output.token_versions, output.response_mask, strict=True) if is_policy}
            if sampled != {version}:
                prompt, session = divmod(position, mode.n)
                raise EvaluationError(
                    f"session val-{prompt}_{session} of the {mode.name} evaluation of version {version} was sampled by "
                    f"version {', '.join(map(str, sorted(sampled)))}: an evaluation is of one version"
                )


def _sessions_at_once(run: TrainRun) -> int:
    """Enough to fill the engine's slots while tools run; few enough that none spends its deadline waiting for a slot, which would
    leave the long answers out of the means."""
    return run.agent.max_concurrent_sessions or SESSIONS_A_SLOT * run.rollout.max_num_seqs


def _numbers(outputs: Sequence[AgentLoopOutput], results: Sequence[SessionResult]) -> dict[str, float]:
    scores = [output.reward_score for output in outputs if output.reward_score is not None]
    return {
        "success": _mean([score >= SUCCESS_SCORE for score in scores]),
        "score": _mean(scores),
        "tool_share": _mean([bool(output.extra_fields.get("num_tool_calls", 0)) for output in outputs]),
        "num_turns": _mean([output.num_turns for output in outputs]),
        "response_length": _mean([len(output.response_ids) for output in outputs]),
        "failed": float(sum(result.failure is not None for result in results)),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
