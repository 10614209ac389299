"""What is sent and read on each of the two routes that return token ids.

GenerateRequest -> [Route.body] -> HTTP -> [Route.read] -> Piece -> Answer -> Generation

`TOKENS` is vLLM's own route: ids in and out, and the weight version of each token. `COMPLETIONS` is OpenAI's, with ids by an
extension that vLLM has; it tells no versions, so no weights may change while it answers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from asyncrl.errors import EngineError
from asyncrl.ports import Json, SamplingParams
from asyncrl.rollout.openai.errors import ServerRefusedError

INTERVAL = 32
"""Tokens an event. One event a token costs a third more CPU, client and server together; at 32 a stream costs nothing that can be
measured, and an engine of 20 ms a step still gives a sign of life in less than a second."""
STRINGS_INTERVAL = 8
"""The same where stop strings are looked for: what is sampled after one is thrown away."""
LOWEST = -9000.0
"""vLLM says -9999 where it has no finite number."""
ROUNDING = 1e-3
"""A log-prob may be so much above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One event. finish_reason: None unless it is the last one. alternatives: likeliest tokens of each place, where asked for."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: str | None = None
    spans: Sequence[tuple[str, int, int]] | None = None
    """(version, start, end), on the last one where the route tells them."""
    alternatives: Sequence[Mapping[int, float]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """has_versions: the last event says which weights each token is of."""

    path: str
    has_versions: bool
    body: Callable[..., Json]
    """(prompt_ids, params, model, request_id): what is posted."""
    read: Callable[[bytes], Piece]
    """Raises EngineError for data that is no event of this route."""


def sampling_body(sampling: SamplingParams, *, seed: int, budget: int, num_alternatives: int = 0) -> dict[str, Json]:
    """Names are the same on both routes. A greedy answer is of the unfiltered softmax, as with the other engines."""
    filters = {"top_k": sampling.top_k, "top_p": sampling.top_p} if sampling.temperature else {"top_k": 0, "top_p": 1.0}
    return {
        "temperature": sampling.temperature,
        **filters,
        "max_tokens": budget,
        "seed": seed,
        "logprobs": num_alternatives,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stream_interval": STRINGS_INTERVAL if sampling.stop_strings else INTERVAL,
    }


def _tokens_body(prompt_ids: Sequence[int], params: dict[str, Json], model: str, request_id: str) -> Json:
    return {
        "token_ids": list(prompt_ids),
        "sampling_params": {**params, "detokenize": False},
        "model": model,
        "request_id": request_id,
        "stream": True,
    }


def _completions_body(prompt_ids: Sequence[int], params: dict[str, Json], model: str, request_id: str) -> Json:
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return {"prompt": list(prompt_ids), **params, **ids, "model": model, "request_id": request_id, "stream": True}


class _Version(msgspec.Struct):
    version: str
    start: int
    end: int


class _Alternative(msgspec.Struct):
    token_id: int
    logprob: float


class _Place(msgspec.Struct):
    token_id: int
    logprob: float
    top_logprobs: list[_Alternative] = []


class _Places(msgspec.Struct):
    content: list[_Place] | None = None


class _TokensChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Places | None = None
    finish_reason: str | None = None
    weight_versions: list[_Version] | None = None


class _TokensEvent(msgspec.Struct):
    choices: list[_TokensChoice] = []
    error: Json = None


class _LogProbs(msgspec.Struct):
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float]] | None = None


class _CompletionsChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None


class _CompletionsEvent(msgspec.Struct):
    choices: list[_CompletionsChoice] = []
    error: Json = None


Event = TypeVar("Event", _TokensEvent, _CompletionsEvent)

_read_tokens_event = msgspec.json.Decoder(_TokensEvent).decode
_read_completions_event = msgspec.json.Decoder(_CompletionsEvent).decode


def _tokens_piece(data: bytes) -> Piece:
    event = _decoded(_read_tokens_event, data)
    if not event.choices:
        return Piece(token_ids=(), log_probs=())
    choice = event.choices[0]
    places = (choice.logprobs and choice.logprobs.content) or []
    ids = _ids(choice.token_ids, choice.finish_reason)
    if [place.token_id for place in places] != ids:
        _check_one_each(len(places), len(ids))
        raise EngineError("the server's log-probs are of other tokens than those it answered with")
    return Piece(
        token_ids=ids,
        log_probs=[_checked(place.logprob) for place in places],
        finish_reason=choice.finish_reason,
        spans=None if choice.weight_versions is None else [(each.version, each.start, each.end) for each in choice.weight_versions],
        alternatives=[{each.token_id: each.logprob for each in place.top_logprobs} for place in places],
    )


def _completions_piece(data: bytes) -> Piece:
    event = _decoded(_read_completions_event, data)
    if not event.choices:
        return Piece(token_ids=(), log_probs=())
    choice = event.choices[0]
    ids = _ids(choice.token_ids, choice.finish_reason)
    log_probs = choice.logprobs.token_logprobs if choice.logprobs else []
    _check_one_each(len(log_probs), len(ids))
    alternatives = (choice.logprobs and choice.logprobs.top_logprobs) or []
    return Piece(
        token_ids=ids,
        log_probs=[_checked(log_prob) for log_prob in log_probs],
        finish_reason=choice.finish_reason,
        alternatives=[_by_id(each) for each in alternatives],
    )


TOKENS = Route(path="/inference/v1/generate", has_versions=True, body=_tokens_body, read=_tokens_piece)
COMPLETIONS = Route(path="/v1/completions", has_versions=False, body=_completions_body, read=_completions_piece)
DONE = b"[DONE]"
"""The last event of a stream; it holds nothing."""
ABORT_PATH = "/inference/v1/abort_requests"


def abort_body(request_id: str) -> Json:
    """Ends a request of TOKENS, whose name vLLM has given a beginning of its own."""
    return {"request_ids": [f"generate-tokens-{request_id}"]}


def _decoded(read: Callable[[bytes], Event], data: bytes) -> Event:
    try:
        event = read(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"the server's answer cannot be read: {error}") from None
    if event.error is not None:
        said = event.error if isinstance(event.error, dict) else {"message": event.error}
        status = said.get("code")
        words = f"the server ended the answer: {said.get('message', said)}"
        raise ServerRefusedError(words, status if isinstance(status, int) else 500)
    return event


def _ids(token_ids: list[int] | None, finish_reason: str | None) -> list[int]:
    """An event without ids may end an answer, and nothing else."""
    if token_ids is None and finish_reason is None:
        raise EngineError("the server's answer has no token ids")
    return token_ids or []


def _check_one_each(num_log_probs: int, num_ids: int) -> None:
    if num_log_probs != num_ids:
        raise EngineError(f"the server answered with {num_ids} token ids and {num_log_probs} log-probs")


def _checked(log_prob: float) -> float:
    if not LOWEST < log_prob < ROUNDING:
        raise EngineError(f"the server answered with the log-prob {log_prob:g}, which is none of a sampled token")
    return min(log_prob, 0.0)


def _by_id(alternatives: Mapping[str, float]) -> dict[int, float]:
    """Of `token_id:7` -> log-prob."""
    try:
        return {int(name.removeprefix("token_id:")): log_prob for name, log_prob in alternatives.items()}
    except ValueError:
        raise EngineError("the server names the tokens of its log-probs by their text, not by their ids") from None
