"""Protocols between rooms, and the plain data that travels through them.

A room sees its neighbours only through this page, which is what lets the simulator stand in for any edge of the controller:
`World` (time, randomness, blocking work), `RolloutEngine` (generation) and `RewardScorer` (reward). Nothing here imports torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from types import TracebackType

    import torch
    from tensordict import TensorDict

T = TypeVar("T")

Json = Any
"""A value that came from outside as JSON: None, bool, int, float, str, list or dict of these."""

Messages = list[dict[str, Json]]
"""Chat messages as Hugging Face templates take them: each has `role` and `content`, perhaps `tool_calls`."""

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens kept."""


# --- the world ------------------------------------------------------------------------------------------------------------------


class World(Protocol):
    """The only door to time, randomness, ids and blocking work. One a run; the simulator has its own."""

    def now(self) -> float:
        """Seconds on the running loop's clock; only differences mean anything."""
        ...

    def wall_time(self) -> float:
        """Seconds since 1970, for logs only."""
        ...

    def seed(self, *parts: str | int) -> int:
        """A 63-bit number that is a pure function of the run's seed and `parts`, on every machine and Python."""
        ...

    def uid(self, number: int) -> str:
        """The uid of the `number`-th prompt of this run, the same after a restart: 16 hex digits."""
        ...

    async def offload(self, function: Callable[..., T], *args: object, pool: str = "files", timeout_s: float | None = None) -> T:
        """Run blocking work off the loop, in the named pool: `files`, `model` (one thread) or `tools` (many).

        Raises DeadlineError after `timeout_s`, time in the pool's queue included. Work that already runs cannot be stopped: its
        thread is counted in `abandoned(pool)` until it ends.
        """
        ...

    def abandoned(self, pool: str) -> int:
        """Threads of the pool still busy with work that nobody waits for: its deadline passed, or its caller was cancelled."""
        ...


# --- generation -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample. `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. The order is temperature, top-k, top-p."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 256
    """New tokens at most; the model's context may stop earlier."""
    stop_token_ids: tuple[int, ...] = ()
    """Each ends the generation and is part of the result."""
    stop_strings: tuple[str, ...] = ()
    """The generation ends with the token that completes one of them; that token is part of the result."""


class StopReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # a stop token or stop string
    LENGTH = "length"  # max_tokens
    CONTEXT = "context"  # the model's context is full


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One generate call. `seed` names the random stream: token k of the answer draws from (seed, position), so it does not depend
    on neighbours in the batch. A retry of a session uses the same seeds."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens `[start, end)` of a generation were sampled from weights `version`."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an engine sampled. log_probs: natural logs under the distribution sampled from (temperature and filters applied),
    finite, one a token. version_spans cover all tokens in order without gaps; empty when there is no token."""

    token_ids: list[int]
    log_probs: list[float]
    version_spans: list[VersionSpan]
    stop_reason: StopReason

    def token_versions(self) -> list[int]:
        return [span.version for span in self.version_spans for _ in range(span.start, span.end)]


class WeightSnapshot(Protocol):
    """Weights that nobody changes any more: full tensors by Hugging Face parameter name, float32 unless the model differs."""

    @property
    def tensors(self) -> "Mapping[str, torch.Tensor]": ...


class RolloutEngine(Protocol):
    """Generates tokens; an async context manager. Every engine passes tests/rollout/test_conformance.py."""

    @property
    def version(self) -> int:
        """Weight version that the next decode step samples from."""
        ...

    @property
    def context_len(self) -> int:
        """Tokens of prompt plus answer that fit at most."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Raises PromptTooLongError when no new token fits, EngineError when the engine dies. Cancelling frees the slot."""
        ...

    async def publish(self, version: int, snapshot: WeightSnapshot) -> None:
        """Swap weights between two decode steps; returns when swapped. Running rows go on with their cache recomputed."""
        ...

    async def pause(self) -> None:
        """No decode step starts until `resume`; returns when the one in flight is done."""
        ...

    async def resume(self) -> None: ...

    def stats(self) -> dict[str, float]:
        """Counters: generated_tokens, running, waiting, free_slots, discarded (results whose future was already done), ..."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None: ...


class Template(Protocol):
    """Text of one model: messages to token ids and back. Safe to call from any thread."""

    @property
    def end_token_id(self) -> int:
        """The token that the template puts after an assistant turn."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Each ends a turn; the template's end token first."""
        ...

    def prepare(self) -> None:
        """Load now what would block the loop at its first use."""
        ...

    def token_id(self, text: str) -> int | None:
        """The control token spelled `text`, None when there is none."""
        ...

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Ids of the initial messages, tool schemas and generation prompt. Raises ModelError when they cannot be rendered."""
        ...

    def environment_ids(self, messages: Messages) -> list[int]:
        """Ids of what the environment adds after a sampled turn, up to and with the next generation prompt."""
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str: ...

    def decode_turn(self, ids: Sequence[int]) -> str:
        """Text of a sampled turn as the tool-call parser reads it."""
        ...


# --- prompts, sessions and rewards ------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """What a reward function sees of a trajectory. The names follow verl's `compute_score`."""

    data_source: str
    solution_str: str
    """Text of the last assistant turn, without special tokens."""
    ground_truth: Json
    extra_info: dict[str, Json]
    """The row's extra_info plus `num_turns`, `num_tool_calls` and `messages` (the conversation as text)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """A finite score, and what else the function returned (logged as `reward/<name>` where it is a number)."""

    score: float
    extra: dict[str, Json] = field(default_factory=dict)


class RewardScorer(Protocol):
    """Scores one trajectory within a deadline. Raises RewardError or DeadlineError; never invents a number."""

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
    """Whose fault a failed session is: the machinery's (it says nothing about the policy), or the model's."""

    INFRA = "infra"
    MODEL = "model"


class Rows(Protocol):
    """The rows of a dataset, each a dict as `RLHFDataset` makes them."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> dict[str, Json]: ...


# --- training -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What a stage knows besides its batch."""

    step: int
    """Training step, from 1."""
    version: int
    """Weight version of the actor: the number of published updates so far."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSchema:
    """What one column of some rows looks like, without its payload."""

    field: str
    dtype: str
    """A torch dtype name, or `object`."""
    device: str
    layout: str
    """`ragged`, `stacked` (one tensor a row) or `object` (one JSON value a row)."""
    shape: tuple[int, ...]
    """Of one entry along the ragged axis, or of one stacked row."""
    lengths: tuple[int, ...]
    """A row: its entries along the ragged axis, 1 in the other layouts, -1 where it lacks the column."""
    mask_sums: tuple[int, ...] | None
    """A row: `response_mask.sum()` as it was found beside the column; None where no mask was there."""


class Access(StrEnum):
    """What a box of the way did with a column."""

    READ = "read"
    WRITE = "write"
    TAKE = "take"  # sample: handed its keys on
    FREE = "free"  # retire: ended it


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldReport(FieldSchema):
    """A column as a box of the way found or left it, for the lineage: of the traced rows alone."""

    stage: str
    access: Access


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldField(FieldSchema):
    """A column as the store holds it. by_stage: a training step wrote it, not a session."""

    by_stage: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """What a stage leaves behind in the controller: numbers, and what it read and wrote of traced rows; never the payload."""

    metrics: dict[str, float]
    reports: tuple[FieldReport, ...] = ()


# --- tracing ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """How the processes that hold one model are cut. dp: data, sp: sequence, tp: tensor, pp: pipeline, cp: context parallel.

    The actor's and the rollout's are two different ones; neither follows from the other.
    """

    world: int = 1
    dp: int = 1
    sp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1


class Policy(Protocol):
    """The actor as the trainer and its stages see it. Its methods block, and are called one at a time in the `model` pool."""

    @property
    def num_ranks(self) -> int:
        """Ranks that share a batch: the data-parallel size."""
        ...

    @property
    def topology(self) -> Topology: ...

    def snapshot(self, version: int) -> WeightSnapshot:
        """The weights now, as version `version`."""
        ...

    def log_probs(self, columns: "TensorDict") -> "tuple[torch.Tensor, torch.Tensor]":
        """(log_probs, entropy), ragged float32 on the response axis."""
        ...

    def update(self, columns: "TensorDict", group_ids: Sequence[str | None]) -> dict[str, float]:
        """One pass over the batch; metrics. group_ids: the uid of each row, None for padding."""
        ...


class SpanKind(StrEnum):
    """What a stretch of time was spent on."""

    WAIT = "wait"
    SESSION = "session"
    TURN = "turn"  # one generate call
    TOOL = "tool"
    REWARD = "reward"
    STAGE = "stage"


class Span(Protocol):
    """A stretch of time under way: a context manager that ends when its block does, however that does. What it is inside of is
    the span it was made from."""

    @property
    def is_traced(self) -> bool:
        """False where nothing is recorded, so that facts need not be gathered."""
        ...

    def span(self, kind: SpanKind, name: str) -> "Span":
        """Begin another one inside this one."""
        ...

    def note(self, *, outcome: str = "", **facts: Json) -> None:
        """Add facts. outcome: in place of `ok`; a block that raises has the error's."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None") -> None: ...


SessionSpan = Callable[[str, int], Span]
"""(uid, session_id) -> the span of a session that begins now."""
