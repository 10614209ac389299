"""Generation: what an engine is asked, what it answers, and a model's text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, Self

from asyncrl.ports.values import Messages

if TYPE_CHECKING:
    from types import TracebackType

    import torch


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
    session: str = ""
    """Requests of one session share the beginning of their prompts: a router keeps them on one engine, which has it in its cache.
    Empty: of none."""


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

    @property
    def failure(self) -> str | None:
        """Why no request is served any more, for good: it died, or was closed. None while it serves."""
        ...

    @property
    def beats(self) -> int:
        """Steps so far. It grows while the engine works, and only then: who waits for an answer sees by it that there is hope."""
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
