"""The quick start's task: 2-digit sums of one or two operations, with a part of all problems set aside by a hash of their text.

[problems] -> demonstrator -> warm start; [problems] -> rows -> feed. A held-out problem can be drawn for evaluation only: the split
comes before anything else and does not depend on a seed.
"""

import hashlib
import operator
import random
from dataclasses import dataclass

from asyncrl.ports import Json

OPERATIONS = {"+": operator.add, "-": operator.sub}
"""What one call of the calculator can do in this task."""

DATA_SOURCE = "calculator"

HELD_OUT_PERCENT = 10
"""Share of all problems that only evaluation may see."""

TWO_OPERATIONS_SHARE = 0.5
"""Half of the problems need two calls of the tool, because a call does one operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation: the running value (or `left` at the start), then `symbol`, then `right`."""

    symbol: str
    right: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`left` followed by one or two steps, worked from left to right."""

    left: int
    steps: tuple[Step, ...]

    @property
    def question(self) -> str:
        return f"what is {self.left}{''.join(f'{step.symbol}{step.right}' for step in self.steps)}?"

    @property
    def answer(self) -> int:
        value = self.left
        for step in self.steps:
            value = OPERATIONS[step.symbol](value, step.right)
        return value

    @property
    def is_held_out(self) -> bool:
        digest = hashlib.blake2b(self.question.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % 100 < HELD_OUT_PERCENT


def draw_operand(source: random.Random) -> int:
    """A number of two digits."""
    return source.randint(10, 99)


def draw_problem(source: random.Random, *, held_out: bool) -> Problem:
    """A problem of the wanted side of the split."""
    while True:
        count = 2 if source.random() < TWO_OPERATIONS_SHARE else 1
        steps = tuple(Step(symbol=source.choice("+-"), right=draw_operand(source)) for _ in range(count))
        problem = Problem(left=draw_operand(source), steps=steps)
        if problem.is_held_out == held_out:
            return problem


def draw_distinct(source: random.Random, count: int, *, held_out: bool) -> list[Problem]:
    """`count` different problems in the order drawn."""
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = draw_problem(source, held_out=held_out)
        found.setdefault(problem.question, problem)
    return list(found.values())


def to_row(problem: Problem, index: int) -> dict[str, Json]:
    """The problem as a dataset row: prompt, data_source, reward_model.ground_truth, extra_info."""
    return {
        "prompt": [{"role": "user", "content": problem.question}],
        "data_source": DATA_SOURCE,
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"index": index, "num_operations": len(problem.steps)},
    }
