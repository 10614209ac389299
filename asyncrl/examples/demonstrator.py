"""A deliberately noisy demonstrator for the warm start: it knows how to call the calculator, and mostly does not bother.

problems -> [demonstrator] -> sft. What it teaches is the form of a call and the copying of operands, not when to call: in the last
stage most conversations answer at once, with a number near the right one and wrong. A policy that imitates it guesses when it
decodes greedily and calls the tool in a part of its samples. Reinforcement learning has to find out that calling pays.
"""

import random
from collections.abc import Mapping
from enum import StrEnum

from asyncrl.examples.problems import OPERATIONS, Problem, draw_operand
from asyncrl.ports import Json, Messages

TOOL = "calculator"


class Habit(StrEnum):
    """How one conversation goes."""

    GOOD = "good"  # a call for each operation, then the last result
    GUESS = "guess"  # no call, a wrong number
    MISCOPY = "miscopy"  # calls with other right operands
    EARLY = "early"  # stops after the first call; with one operation it also ignores the result
    WRONG_OPERATION = "wrong_operation"  # plus for minus and the other way round


Mix = Mapping[Habit, float]

MECHANICS: Mix = {Habit.GOOD: 0.91, Habit.MISCOPY: 0.03, Habit.EARLY: 0.03, Habit.WRONG_OPERATION: 0.03}
"""First stage: the form of a call and the copying of operands. More noise than this delays the copying by hundreds of steps."""

STYLE: Mix = {Habit.GOOD: 0.2, Habit.GUESS: 0.75, Habit.MISCOPY: 0.02, Habit.EARLY: 0.01, Habit.WRONG_OPERATION: 0.02}
"""Last stage: guessing is the majority, so greedy decoding guesses."""

GUESS_ERRORS = (-20, -11, -10, -3, -2, -1, 1, 2, 3, 9, 10, 11, 20)
"""A guess is off by one of these: never right, so the demonstrations give no answer away."""


def demonstrate(problem: Problem, mix: Mix, source: random.Random) -> Messages:
    """One conversation, its habit drawn from `mix`."""
    habit = source.choices(list(mix), list(mix.values()))[0]
    question = {"role": "user", "content": problem.question}
    if habit is Habit.GUESS:
        return [question, _answer(problem.answer + source.choice(GUESS_ERRORS))]
    return [question, *_work(problem, habit, source)]


def _work(problem: Problem, habit: Habit, source: random.Random) -> Messages:
    messages: Messages = []
    value = problem.left
    for step in problem.steps:
        right = draw_operand(source) if habit is Habit.MISCOPY else step.right
        symbol = _other(step.symbol) if habit is Habit.WRONG_OPERATION else step.symbol
        messages.append(_call(f"{value}{symbol}{right}"))
        value = OPERATIONS[symbol](value, right)
        messages.append({"role": "tool", "content": str(value)})
        if habit is Habit.EARLY:
            return [*messages, _answer(draw_operand(source) if len(problem.steps) == 1 else value)]
    return [*messages, _answer(value)]


def _other(symbol: str) -> str:
    return "-" if symbol == "+" else "+"


def _answer(value: int) -> dict[str, Json]:
    return {"role": "assistant", "content": str(value)}


def _call(expression: str) -> dict[str, Json]:
    function = {"name": TOOL, "arguments": {"expression": expression}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
