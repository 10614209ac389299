"""The real vLLM behind VLLMEngine: an AsyncLLM on our loop. Imports vllm: imported by `launch`, in a thread."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import PrometheusStatLogger

from asyncrl.errors import EngineError
from asyncrl.ports import VersionSpan, World
from asyncrl.rollout.vllm.answers import Call, Part
from asyncrl.rollout.vllm.control import LLMControl
from asyncrl.rollout.vllm.meter import Meter
from asyncrl.rollout.vllm.processes import Process, outlived_by_none
from asyncrl.wording import named_message_of

CLOSE_TIMEOUT_S = 30.0
"""vLLM gives its processes 5 s to end by themselves, and kills them then."""


class LLM:
    """A Client over `llm`. Made in a thread."""

    def __init__(self, llm: AsyncLLM, meter: Meter, processes: Sequence[Process], world: World) -> None:
        self._llm = llm
        self._world = world
        self.meter = meter
        self.processes = processes
        self.control = LLMControl(llm)
        self.vocab_size: int = llm.model_config.get_vocab_size()
        # Once here, in a thread: for the first request vLLM looks through all installed packages for plugins.
        llm.input_processor.process_inputs("", tokens_input([0]), SamplingParams(max_tokens=1), ("generate",))

    @property
    def is_dead(self) -> bool:
        return bool(self._llm.errored)

    async def parts(self, call: Call) -> AsyncGenerator[Part, None]:
        prompt = tokens_input(list(call.request.prompt_ids))
        try:
            async with aclosing(self._llm.generate(prompt, _sampling_params(call), call.request_id)) as outputs:
                async for output in outputs:
                    yield _part(output.outputs[0])
        except EngineDeadError as error:
            raise EngineError("vLLM's EngineCore has failed: what it has printed says why") from error
        except EngineGenerateError as error:
            raise EngineError(f"vLLM failed at {_who(call)}: {named_message_of(error.__cause__ or error)}") from error
        except (VLLMClientError, ValueError) as error:
            raise EngineError(f"vLLM refuses {_who(call)}: {named_message_of(error)}") from error

    async def abort(self, call: Call) -> None:
        await self._llm.abort(call.request_id)

    async def close(self) -> None:
        """Its tasks on this loop and its sockets are closed as well when it returns; vLLM leaves them to the garbage collector."""
        resources = self._llm.engine_core.resources
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # it would take the end for a failure, and print that
        await _ended(self._llm.output_handler)
        with outlived_by_none(self.processes):
            await self._world.offload(self._llm.shutdown, pool="engines", timeout_s=CLOSE_TIMEOUT_S)
        await _ended(resources.output_queue_task)
        await self._world.offload(resources.ctx.destroy, 0, pool="engines", timeout_s=CLOSE_TIMEOUT_S)
        self._llm.shutdown = _is_shut_down  # its __del__ calls it, maybe at the end of Python, when half of what it needs is gone


def _is_shut_down() -> None:
    """Once is enough."""


async def _ended(task: "asyncio.Task[None] | None") -> None:
    if task is not None:
        await asyncio.wait({task}, timeout=CLOSE_TIMEOUT_S)


def _who(call: Call) -> str:
    return f"request {call.request.request_id!r}"


def _sampling_params(call: Call) -> SamplingParams:
    """vLLM ends an answer for our stop ids and budget alone. Greedy log-probs are those of the unfiltered softmax already."""
    sampling = call.request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        max_tokens=call.max_tokens,
        seed=call.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        skip_clone=True,
        output_kind=RequestOutputKind.DELTA if call.has_strings else RequestOutputKind.FINAL_ONLY,
    )


def _part(output: CompletionOutput) -> Part:
    """logprobs=0: one log-prob a token, that of the token itself."""
    spans = output.weight_versions
    return Part(
        token_ids=output.token_ids,
        log_probs=[] if output.logprobs is None else output.logprobs.logprobs,
        spans=None if spans is None else [VersionSpan(start=s.start, end=s.end, version=int(s.version)) for s in spans],
        finish=output.finish_reason,
    )


def meter_logger(meter: Meter) -> type[Any]:
    """A class of stat logger for AsyncLLM's `stat_loggers`. It takes the place of vLLM's Prometheus logger, which would be added
    without it, keeps registries for the whole process and costs more than the rest of a step's statistics."""

    class MeterLogger(PrometheusStatLogger):  # type: ignore[misc] # vllm has no types where mypy runs
        def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
            meter.record(scheduler_stats, iteration_stats)

        def log(self) -> None:
            pass

        def log_engine_initialized(self) -> None:
            pass

        def record_admission_rejection(self, reason: str) -> None:
            pass

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            pass

    return MeterLogger
