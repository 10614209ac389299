"""The judge without a network: prompts, verdicts, and tries within limits and one deadline, in virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import JudgeConfig, LimitsConfig, RewardConfig
from asyncrl.errors import DeadlineError, RewardError, RewardSpecError
from asyncrl.ports import Json, RewardRequest
from asyncrl.rewards.judge import FIRST_PAUSE_S, Again, Answer, Judge
from asyncrl.rewards.judge_prompt import load_prompt
from asyncrl.rewards.judge_verdict import read_verdict
from asyncrl.rewards.limits import Limits
from asyncrl.simulation.loop import VirtualLoop
from asyncrl.world import RealWorld

Ask = Callable[..., RewardRequest]

# --- verdicts ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 0.25}', 0.25),
        (' {"score": 1}\n', 1.0),
        ("Score: 0.5", 0.5),
        ("score:-2", -2.0),
        ("SCORE: +.5e1", 5.0),
        ("The reference says 7.\nScore: 0.5.", 0.5),
        ("**Score:** 0.75", 0.75),
        ("**Score**: **0.75**", 0.75),
        ('```json\n{"score": 0.5, "reason": "half"}\n```', 0.5),
        ("score: 1\nOn reflection, score: 0", 0.0),
        ("score:\n 3", 3.0),
        ("score: 5 out of 10", 5.0),
    ],
)
def test_a_verdict_is_read(text: str, score: float) -> None:
    assert read_verdict(text)["score"] == score


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0.5",
        "I cannot grade this.",
        "score",
        "score: high",
        "score: 7/10",
        "score: 70%",
        "score: 1.2.3",
        "score: 1 score: none",
        "score: nan",
        "score: inf",
        "score: 1e999",
        "underscore: 1",
        '{"score": "0.5"}',
        '{"score": true}',
        '{"score": NaN}',
        '{"score": null}',
        '{"score": 1e999}',
        '{"scores": 1}',
        '[{"score": 1}]',
        "null",
        "1" * 5000,
        "[" * 100_000,
    ],
)
def test_anything_else_is_an_error_and_never_a_number(text: str) -> None:
    with pytest.raises(RewardError, match="the judge said") as caught:
        read_verdict(text)
    assert len(str(caught.value)) < 300


def test_what_else_a_verdict_holds_is_kept() -> None:
    assert read_verdict('{"reason": "half", "score": 1, "style": 0.5}') == {"reason": "half", "score": 1.0, "style": 0.5}


@given(st.text(alphabet="score:. 0123456789-+eE*\"'{}[]/\n", max_size=60))
def test_no_text_gives_anything_but_a_finite_score_or_an_error(text: str) -> None:
    try:
        score = read_verdict(text)["score"]
    except RewardError:
        return
    assert isinstance(score, float)
    assert abs(score) < float("inf")


# --- prompts ----------------------------------------------------------------------------------------------------------------------


def test_the_built_in_prompt_has_task_reference_and_answer(ask: Ask) -> None:
    said = [{"role": "system", "content": "S"}, {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    message = load_prompt("").message(ask("it is 4", "four", messages=said))
    assert [part in message for part in ("2 + 2?", "it is 4", "four", '{"score": S}')] == [True] * 4
    assert "There is none" in load_prompt("").message(ask("it is 4", None))


def test_a_template_of_the_user_sees_every_field_and_changes_none(tmp_path: Path, ask: Ask) -> None:
    path = tmp_path / "judge.jinja"
    path.write_text("{{ data_source }} {{ solution_str }} {{ ground_truth[0] }} {{ extra_info.a }} {{ response_len }}\n")
    assert load_prompt(str(path)).message(ask("x", [1], a="b", response_len=9)) == "test x 1 b 9\n"
    path.write_text("{{ extra_info.update(a=1) }}")
    with pytest.raises(RewardError, match=r"reward\.judge\.prompt cannot be filled for this row: .*SecurityError"):
        load_prompt(str(path)).message(ask())


@pytest.mark.parametrize("source", ["{{ extra_info.nothing }}", "{{ ground_truth.x.y }}", "{{ 1 // 0 }}", "{{ ground_truth + 1 }}"])
def test_a_row_that_does_not_fit_the_template_is_an_error_of_its_session(tmp_path: Path, ask: Ask, source: str) -> None:
    (tmp_path / "judge.jinja").write_text(source)
    with pytest.raises(RewardError, match=r"reward\.judge\.prompt cannot be filled for this row: "):
        load_prompt(str(tmp_path / "judge.jinja")).message(ask("x", "truth"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            b"{{ solution }}",
            ": no 'solution'; a template sees data_source, solution_str, ground_truth, ",
        ),
        (b"{{ solution_str", ", line 1: unexpected end of template"),
        (b"\n{% for %}", ", line 2: "),
        (b"\xff", ": cannot be read"),
        (b" \n", ": the file is empty"),
        (b"{% include 'rules.jinja' %}", ": it includes or extends 'rules.jinja'; a template is one file"),
        (b"{% extends base %}", ": it includes or extends 'another template'"),
        (b"{{ " + b"(" * 3000 + b"1" + b")" * 3000 + b" }}", ": its expressions are nested too deeply"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_line_of_the_user(tmp_path: Path, source: bytes, message: str) -> None:
    path = tmp_path / "judge.jinja"
    path.write_bytes(source)
    with pytest.raises(RewardSpecError) as caught:
        load_prompt(str(path))
    assert str(caught.value).startswith(f"reward.judge.prompt = {str(path)!r}{message}")
    assert "\n" not in str(caught.value)
    with pytest.raises(RewardSpecError, match="cannot be read"):
        load_prompt(str(tmp_path / "absent"))
    with pytest.raises(RewardSpecError, match="cannot be read"):
        load_prompt("a\0b")


# --- tries ------------------------------------------------------------------------------------------------------------------------

GOOD = Answer(text='{"score": 0.5}', tokens=12)


@dataclass
class Scripted:
    """An endpoint that gives these answers, one a try, each after `takes_s` seconds."""

    answers: list[Answer | Again | RewardError]
    takes_s: float = 1.0
    asked_s: list[float] = field(default_factory=list)

    async def ask(self, message: str) -> Answer | Again:
        self.asked_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.takes_s)
        answer = self.answers.pop(0)
        if isinstance(answer, RewardError):
            raise answer
        return answer


def judged(
    endpoint: Scripted, *, timeout_s: float = 1000.0, limits: dict[str, float] | None = None, calls: int = 1, **keys: int
) -> list[Json]:
    """Value or error of each of `calls` calls that begin at time 0."""
    given = LimitsConfig(**(limits or {}))  # type: ignore[arg-type]
    config = RewardConfig(manager="judge", timeout_s=timeout_s, judge=JudgeConfig(**keys), limits=given)  # type: ignore[arg-type]
    request = RewardRequest(data_source="", solution_str="", ground_truth="", extra_info={}, response_len=1)
    judge = Judge(endpoint, load_prompt(""), Limits(given), config, RealWorld(run_seed=1))

    async def main() -> list[Json]:
        return await asyncio.gather(*(judge(request) for _ in range(calls)), return_exceptions=True)

    with closing(VirtualLoop(0)) as loop:
        results = loop.run_until_complete(main())
    assert judge.stats()["running"] == judge.stats()["queued"] == 0
    return results


def test_a_verdict_comes_with_its_tokens_and_tries() -> None:
    assert judged(Scripted([GOOD])) == [{"score": 0.5, "judge_tokens": 12, "judge_attempts": 1}]
    assert judged(Scripted([Again(reason="busy"), GOOD]))[0]["judge_attempts"] == 2


def test_pauses_double_and_are_never_shorter_than_asked_for() -> None:
    endpoint = Scripted([Again(reason="busy"), Again(reason="busy"), Again(reason="busy", after_s=7.0), GOOD])
    assert judged(endpoint)[0]["score"] == 0.5
    pauses = [later - earlier - 1.0 for earlier, later in zip(endpoint.asked_s, endpoint.asked_s[1:], strict=False)]
    for pause, asked, longest in zip(pauses, (0, 0, 7), (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S), strict=True):
        assert asked + longest / 2 <= pause <= asked + longest


def test_sessions_that_failed_together_do_not_come_back_together() -> None:
    endpoint = Scripted([*([Again(reason="busy")] * 20), *([GOOD] * 20)])
    assert [value["score"] for value in judged(endpoint, calls=20)] == [0.5] * 20
    assert len(set(endpoint.asked_s)) == 21


def test_tries_are_counted_and_the_last_reason_is_told() -> None:
    endpoint = Scripted([Again(reason=f"reason {number}") for number in range(9)])
    (error,) = judged(endpoint, max_attempts=3)
    assert str(error) == "the judge gave no answer in 3 attempts; the last: reason 2"
    assert len(endpoint.asked_s) == 3


def test_what_another_try_would_not_mend_is_not_tried_again() -> None:
    endpoint = Scripted([RewardError("it answered 400"), GOOD])
    assert str(judged(endpoint)[0]) == "it answered 400"
    assert len(endpoint.asked_s) == 1


def test_all_tries_together_meet_one_deadline() -> None:
    hanging = Scripted([GOOD], takes_s=50.0)
    (error,) = judged(hanging, timeout_s=20.0)
    assert isinstance(error, DeadlineError)
    assert str(error) == "the judge took longer than reward.timeout_s = 20"
    slow = Scripted([Again(reason="busy")] * 9, takes_s=8.0)
    (error,) = judged(slow, timeout_s=20.0, max_attempts=9)
    assert isinstance(error, DeadlineError)
    assert len(slow.asked_s) == 3


def test_a_pause_longer_than_what_is_left_ends_the_call_at_once() -> None:
    endpoint = Scripted([Again(reason="it answered 429", after_s=60.0)])
    (error,) = judged(endpoint, timeout_s=20.0)
    assert isinstance(error, RewardError)
    assert "the judge gave no answer in 1 attempts, and a pause of 60." in str(error)
    assert str(error).endswith("is more than is left of reward.timeout_s = 20; the last: it answered 429")


def test_every_try_is_a_call_of_its_minute() -> None:
    endpoint = Scripted([Again(reason="busy"), Again(reason="busy"), GOOD, GOOD])
    assert [value["score"] for value in judged(endpoint, calls=2, limits={"max_rpm": 3})] == [0.5, 0.5]
    began_s = endpoint.asked_s[0]
    assert endpoint.asked_s[2] - began_s < 60
    assert endpoint.asked_s[3] - began_s == 60


def test_waiting_in_line_costs_nothing_of_the_calls_own_time() -> None:
    endpoint = Scripted([GOOD] * 9, takes_s=15.0)
    results = judged(endpoint, calls=9, timeout_s=20.0, limits={"max_concurrent": 1})
    assert [value["score"] for value in results] == [0.5] * 9
    expired = judged(Scripted([GOOD] * 9, takes_s=15.0), calls=3, limits={"max_concurrent": 1, "queue_timeout_s": 20.0})
    assert sorted(type(result).__name__ for result in expired) == ["DeadlineError", "dict", "dict"]


def test_no_place_is_held_in_a_pause() -> None:
    endpoint = Scripted([Again(reason="busy", after_s=100.0), GOOD, GOOD])
    results = judged(endpoint, calls=2, limits={"max_concurrent": 1})
    assert [value["score"] for value in results] == [0.5, 0.5]
    assert endpoint.asked_s[1] - endpoint.asked_s[0] == 1.0


def test_a_cancellation_anywhere_leaves_nothing() -> None:
    config = RewardConfig(manager="judge", judge=JudgeConfig())
    request = RewardRequest(data_source="", solution_str="", ground_truth="", extra_info={}, response_len=1)

    def run(cancel: Callable[[asyncio.Task[Json], Judge], Coroutine[Any, Any, None]]) -> None:
        endpoint = Scripted([Again(reason="busy"), GOOD])
        judge = Judge(endpoint, load_prompt(""), Limits(LimitsConfig(max_concurrent=1)), config, RealWorld())

        async def main() -> None:
            task = asyncio.create_task(judge(request))
            await cancel(task, judge)

        with closing(VirtualLoop(0)) as loop:
            loop.run_until_complete(main())
            assert [timer for _, _, timer in loop._scheduled if not timer.cancelled()] == []
        assert judge.stats()["running"] == judge.stats()["queued"] == 0

    for after_s in (0.0, 0.5, 1.1, 1.9):

        async def cancel(task: asyncio.Task[Json], judge: Judge, after_s: float = after_s) -> None:
            await asyncio.sleep(after_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        run(cancel)
