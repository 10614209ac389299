"""The quick start's problems: the split comes first and depends on nothing but the problem."""

import random

import pytest

from asyncrl.examples.calculator import demonstrations, train_rows, val_rows
from asyncrl.examples.demonstrator import GUESS_ERRORS, MECHANICS, STYLE, Habit, demonstrate
from asyncrl.examples.problems import Problem, Step, draw_distinct, draw_problem
from asyncrl.tools.calculator import calculator

TWO_STEPS = Problem(left=12, steps=(Step(symbol="-", right=34), Step(symbol="+", right=56)))


def test_a_problem_is_worked_from_left_to_right() -> None:
    assert TWO_STEPS.question == "what is 12-34+56?"
    assert TWO_STEPS.answer == 34


def test_no_training_row_or_demonstration_has_a_held_out_problem() -> None:
    held_out = {row["prompt"][0]["content"] for row in val_rows()}
    asked = {row["prompt"][0]["content"] for row in train_rows(1)}
    shown = {talk[0]["content"] for mix in (MECHANICS, STYLE) for talk in demonstrations(mix, 2000, seed=1, name="any")}
    assert len(held_out) == 256
    assert not held_out & (asked | shown)
    assert all(_parse(question).is_held_out for question in held_out)
    assert not any(_parse(question).is_held_out for question in asked | shown)


def test_a_tenth_of_all_problems_is_held_out() -> None:
    source = random.Random(1)
    drawn = [Problem(left=source.randint(10, 99), steps=(Step(symbol="+", right=source.randint(10, 99)),)) for _ in range(4000)]
    assert sum(problem.is_held_out for problem in drawn) / len(drawn) == pytest.approx(0.1, abs=0.02)


def test_held_out_rows_are_the_same_for_every_seed_and_training_rows_are_not() -> None:
    assert val_rows() == val_rows()
    assert train_rows(1) == train_rows(1) != train_rows(2)


def test_a_row_has_what_the_dataset_wants() -> None:
    row = val_rows()[3]
    assert row["prompt"] == [{"role": "user", "content": row["prompt"][0]["content"]}]
    assert row["reward_model"]["ground_truth"] == str(_parse(row["prompt"][0]["content"]).answer)
    assert row["extra_info"]["index"] == 3


def test_distinct_problems_are_distinct() -> None:
    assert len({problem.question for problem in draw_distinct(random.Random(1), 500, held_out=False)}) == 500


def test_guesses_are_always_wrong() -> None:
    assert 0 not in GUESS_ERRORS
    source = random.Random(1)
    for _ in range(200):
        problem = draw_problem(source, held_out=False)
        question, answer = demonstrate(problem, {Habit.GUESS: 1.0}, source)
        assert question["content"] == problem.question
        assert answer["content"] != str(problem.answer)


def test_a_good_conversation_calls_once_an_operation_and_gives_the_last_result() -> None:
    talk = demonstrate(TWO_STEPS, {Habit.GOOD: 1.0}, random.Random(1))
    assert [message["role"] for message in talk] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    calls = [message["tool_calls"][0]["function"] for message in talk if message.get("tool_calls")]
    assert [call["arguments"]["expression"] for call in calls] == ["12-34", "-22+56"]
    assert talk[-1]["content"] == "34"


@pytest.mark.parametrize("habit", [habit for habit in Habit if habit is not Habit.GUESS])
def test_shown_results_are_those_of_the_calculator(habit: Habit) -> None:
    source = random.Random(1)
    for _ in range(50):
        talk = demonstrate(draw_problem(source, held_out=False), {habit: 1.0}, source)
        for call, result in zip(talk[1::2], talk[2::2], strict=False):
            assert result["content"] == calculator(call["tool_calls"][0]["function"]["arguments"]["expression"])


def _parse(question: str) -> Problem:
    text = question.removeprefix("what is ").removesuffix("?")
    left, steps = int(text[:2]), text[2:]
    return Problem(
        left=left, steps=tuple(Step(symbol=steps[at], right=int(steps[at + 1 : at + 3])) for at in range(0, len(steps), 3))
    )
