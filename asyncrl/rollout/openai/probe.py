"""What a server can do, asked when an engine is opened. One that cannot serve is refused in one line, before anything is sampled.

settings -> [probe] -> Server

Asked in this order: is it there, has it the model, is its context long enough, does it take new weights (where it must), which
route returns token ids and log-probs, and of which distribution the log-probs are. There is no fallback to text: ids that are made
from text are not those that were sampled.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.errors import EngineError
from asyncrl.ports import Json, SamplingParams
from asyncrl.rollout.openai.errors import ServerLostError, ServerMisfitError, ServerRefusedError
from asyncrl.rollout.openai.http import Http
from asyncrl.rollout.openai.routes import COMPLETIONS, DONE, TOKENS, Piece, Route, sampling_body
from asyncrl.rollout.openai.settings import ServerSettings
from asyncrl.rollout.publication.control import Control
from asyncrl.waiting import back_off, within
from asyncrl.wording import names_shown

log = logging.getLogger(__name__)

Prompt = tuple[int, ...]

LOOK_AGAIN_S = 1.0
"""A server that loads its model does so for many seconds, and cannot tell when it is done."""
HEAT = 2.0
"""Temperature of the probe: the highest that vLLM takes."""
NARROW, WIDE = 0.02, 0.1
"""Nats. Arithmetic of 16 bits moves log-probs by a hundredth. A log-prob that is nearer to that of the wrong distribution is wrong,
unless the two are so near to each other that this cannot be told."""
_PROMPTS = ((1, 2, 3), (7, 4), (9, 3, 8, 5, 6))
"""Small ids: the server's vocabulary may be another than ours."""
_NO_SUCH_ROUTE = (403, 404, 405, 501)
BROKEN_VERSION = "-1"
"""Of weights that are partly old and partly new, until the first publication of the run, which comes before its first request."""
HOW = "start vLLM with `python -m asyncrl.rollout.vllm.serve`, or see docs/engines.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What was found. tells_versions: of each token; else no weights may change while requests are in flight."""

    model: str
    route: Route
    tells_versions: bool


async def probe(http: Http, settings: ServerSettings, *, control: Control | None) -> Server:
    """control: None where the server's weights stay what they are. A server that somebody has left paused is resumed.

    Raises ServerMisfitError.
    """
    await _wait_for(http, settings.wait_s)
    try:
        model = await _model(http, settings)
        if control is not None:
            await _check_control(http, control, settings.vocab_size)
        async with within(settings.control_timeout_s, lambda: "no answer to a request of one token; has somebody paused it?"):
            prompts = [tuple(token % settings.vocab_size for token in prompt) for prompt in _PROMPTS]
            server = await _sampler(http, model, prompts[0])
            await _check_log_probs(http, server, prompts)
    except (EngineError, TimeoutError) as error:
        if isinstance(error, ServerMisfitError):
            raise
        raise ServerMisfitError(http.told(str(error))) from error
    return server


async def is_healthy(http: Http, *, timeout_s: float) -> bool:
    """A server without this route is as healthy as its answers."""
    try:
        await http.call("GET", "/health", timeout_s=timeout_s)
    except ServerLostError:
        return False
    except ServerRefusedError as error:
        return error.status < 500
    return True


async def _wait_for(http: Http, wait_s: float) -> None:
    """Until it takes connections."""
    clock = asyncio.get_running_loop().time
    end, is_told = clock() + wait_s, False
    while True:
        try:
            await http.call("GET", "/health")
            return
        except ServerRefusedError as error:
            if error.status < 500:
                return
            raise ServerMisfitError(f"{error}; the server is not healthy") from error
        except ServerLostError as error:
            if error.has_begun or clock() >= end:
                raise ServerMisfitError(f"{error}; no server answers there: start it, or mend rollout.openai.base_urls") from error
            if not is_told:
                log.warning("%s; waiting up to %g s for the server to start", error, wait_s)
                is_told = True
        await back_off(LOOK_AGAIN_S)


async def _model(http: Http, settings: ServerSettings) -> str:
    try:
        answer = await http.call("GET", "/v1/models", may_repeat=True)
    except ServerRefusedError as error:
        if error.status in (401, 403):
            raise ServerMisfitError(
                f"{error}; it asks for a key, or for another one than rollout.openai.api_key_env names"
            ) from error
        raise
    lengths = _lengths(answer)
    if not lengths:
        raise ServerMisfitError(http.told("/v1/models names no model"))
    name = settings.model or next(iter(lengths))
    if name not in lengths or (not settings.model and len(lengths) > 1):
        asked = f"no model {name!r}" if settings.model else "more than one model, and rollout.openai.model says of none"
        raise ServerMisfitError(http.told(f"it has {asked}; it has {names_shown(lengths)}"))
    length = lengths[name]
    if length is not None and length < settings.context_len:
        words = f"its context is of {length} tokens, and the run's of {settings.context_len}"
        raise ServerMisfitError(http.told(f"{words}; start it with more (--context-len, vLLM's --max-model-len)"))
    return name


def _lengths(answer: Json) -> dict[str, int | None]:
    """Name of each model -> its context, where it is told."""
    models = answer.get("data") if isinstance(answer, dict) else None
    found = [each for each in models if isinstance(each, dict)] if isinstance(models, list) else []
    lengths = {str(each["id"]): each.get("max_model_len") for each in found if "id" in each}
    return {name: length if isinstance(length, int) else None for name, length in lengths.items()}


async def _check_control(http: Http, control: Control, vocab_size: int) -> None:
    """The routes for new weights; and that nobody else's publication is left half way."""
    try:
        answer = await http.call("GET", "/is_paused", may_repeat=True)
    except ServerRefusedError as error:
        if error.status not in _NO_SUCH_ROUTE:
            raise
        raise ServerMisfitError(http.told(f"it has no routes for new weights; {HOW}")) from error
    workers = await _workers(control)
    _check_vocabulary(http, workers, vocab_size)
    if any(worker.get("is_updating") for worker in workers):
        log.warning("%s", http.told("somebody has left it in the middle of new weights; it is given the run's own"))
        await control.finish_weight_update(BROKEN_VERSION)  # between start and finish the first token would be its death
    if isinstance(answer, dict) and answer.get("is_paused"):
        log.warning("%s", http.told("it is paused; whoever did so is gone, and it is resumed"))
        await control.resume()


async def _workers(control: Control) -> list[dict[str, Json]]:
    """What each worker says of itself; nothing without our extension: whoever opens a publisher says what is missing."""
    try:
        workers = await control.collective_rpc("asyncrl_version", {})
    except ServerRefusedError:
        return []
    return [worker for worker in workers if isinstance(worker, dict)]


def _check_vocabulary(http: Http, workers: Sequence[Mapping[str, Json]], vocab_size: int) -> None:
    """Of the model that the workers have: it would die of an id that is not in it."""
    for worker in workers:
        found = worker.get("vocab_size", vocab_size)
        if found != vocab_size:
            raise ServerMisfitError(http.told(f"its model has {found} token ids, and the run's {vocab_size}: it is another model"))


async def _sampler(http: Http, model: str, prompt: Prompt) -> Server:
    """The route that returns token ids and log-probs."""
    refusals: list[str] = []
    for route in (TOKENS, COMPLETIONS):
        try:
            piece = await _ask(http, route, model, prompt, SamplingParams(temperature=0.0))
        except ServerRefusedError as error:
            if error.status not in _NO_SUCH_ROUTE:
                raise
            refusals.append(str(error))
        else:
            return Server(model=model, route=route, tells_versions=route.has_versions and piece.spans is not None)
    raise ServerMisfitError(http.told(f"no route returns token ids ({'; '.join(refusals)}); {HOW}"))


async def _check_log_probs(http: Http, server: Server, prompts: Sequence[Prompt]) -> None:
    """The two likeliest tokens without temperature, and one of them at HEAT with the others filtered out: by the first pair, the
    second's log-prob is known."""
    for seed, prompt in enumerate(prompts):
        cold = await _ask(http, server.route, server.model, prompt, SamplingParams(temperature=0.0))
        hot = await _ask(http, server.route, server.model, prompt, SamplingParams(temperature=HEAT, top_k=2), seed=seed)
        pair = _likeliest(cold.alternatives[0] if cold.alternatives else {})
        if len(pair) < 2:
            raise ServerMisfitError(http.told(f"it does not return the log-probs of the likeliest tokens; {HOW}"))
        (token,), (log_prob,) = hot.token_ids, hot.log_probs
        if token not in pair:
            raise ServerMisfitError(http.told("it does not keep to top_k"))
        expected = pair[token] / HEAT - math.log(sum(math.exp(each / HEAT) for each in pair.values()))
        if abs(log_prob - expected) > max(NARROW, min(WIDE, abs(pair[token] - expected) / 2)):
            wrong = f"at temperature {HEAT:g} and top_k 2 token {token} has {expected:.3f}, and it says {log_prob:.3f}"
            words = f"its log-probs are not of the distribution that it samples from ({wrong})"
            raise ServerMisfitError(http.told(f"{words}; start vLLM with --logprobs-mode processed_logprobs"))


def _likeliest(alternatives: Mapping[int, float]) -> dict[int, float]:
    return dict(sorted(alternatives.items(), key=lambda each: -each[1])[:2])


async def _ask(http: Http, route: Route, model: str, prompt: Prompt, sampling: SamplingParams, seed: int = 0) -> Piece:
    """One token, with the two likeliest beside it."""
    params = sampling_body(sampling, seed=seed, budget=1, num_alternatives=2)
    async with http.stream(route.path, route.body(prompt, params, model, f"probe-{seed}")) as events:
        pieces = [route.read(data) async for data in events if data != DONE]
    sampled = [piece for piece in pieces if piece.token_ids]
    if len(sampled) != 1 or len(sampled[0].token_ids) != 1:
        num = sum(len(piece.token_ids) for piece in sampled)
        raise ServerMisfitError(http.told(f"{route.path} was asked for one token, and answered with {num}"))
    return sampled[0]
