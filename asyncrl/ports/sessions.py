"""Prompts, their groups, and how their sessions are scored."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from asyncrl.ports.values import Json, Messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One admitted dataset row on its way to its sessions."""

    uid: str
    messages: Messages
    data_source: str
    ground_truth: Json = None
    extra_info: dict[str, Json] = field(default_factory=dict)
    tools_kwargs: dict[str, Json] = field(default_factory=dict)
    columns: dict[str, Json] = field(default_factory=dict)
    """Other columns of the row, untouched."""
    global_steps: int = 0
    """Weight version when the group was admitted."""
    number: int = 0
    """It is the `number`-th prompt of the run, from 0: the feed's cursor before it was taken."""
    row: int = -1
    """Position of its row in the dataset; -1: of none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """What a reward manager sees of a session: its last trajectory. The first four are the arguments of verl's `compute_score`."""

    data_source: str
    solution_str: str
    """Text of the last assistant turn, without special tokens."""
    ground_truth: Json
    extra_info: dict[str, Json]
    """The row's extra_info plus `num_turns`, `num_tool_calls` and `messages` (the conversation as text)."""
    response_len: int
    """Tokens after the prompt, tool results included; of a session of several rows, the sum over them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """A finite score, and what else the function returned (logged as `reward/<name>` where it is a number)."""

    score: float
    extra: dict[str, Json] = field(default_factory=dict)


class RewardScorer(Protocol):
    """Scores one session within a deadline. Raises RewardError or DeadlineError; never invents a number."""

    async def score(self, request: RewardRequest) -> RewardResult: ...


class GroupStatus(StrEnum):
    """Where a group stands: the prompt's tag `status`. The agents write it, replay follows it, the progress bar counts it."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILURE = "failure"

    @property
    def is_terminal(self) -> bool:
        return self in (GroupStatus.FINISHED, GroupStatus.FAILURE)


class FailureClass(StrEnum):
    """Whose fault a failed session is: the machinery's (it says nothing about the policy, and the session is tried again), the
    model's, or nobody's: the environment ended the task by itself."""

    INFRA = "infra"
    MODEL = "model"
    TASK = "task"


class Rows(Protocol):
    """The rows of a dataset, each a dict as `RLHFDataset` makes them."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> dict[str, Json]: ...
