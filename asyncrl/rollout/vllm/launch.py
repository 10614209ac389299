"""Starts a vLLM beside this process, in a thread: EngineCore, its child, and one worker a device below that.

VLLMEngine -> [launch] -> Client

Invariants:
1. Nothing is left of an engine whose start was given up, nor of any when this process ends, however it ends.
2. When a start is over the environment is as it was before it.
"""

import multiprocessing
import threading
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.errors import AsyncRLError, ConfigError, EngineError, ModelError
from asyncrl.ports import World
from asyncrl.rollout.vllm.client import Client
from asyncrl.rollout.vllm.environment import child_environment, inherited_by_children
from asyncrl.rollout.vllm.installed import import_vllm
from asyncrl.rollout.vllm.meter import Meter
from asyncrl.rollout.vllm.processes import Offspring, Process, children
from asyncrl.rollout.vllm.settings import VLLMSettings, engine_args
from asyncrl.rollout.vllm.tether import NAME, Tether
from asyncrl.wording import named_message_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM


async def launch(settings: VLLMSettings, world: World) -> Client:
    """An Opener. Takes many seconds; its caller sets the deadline.

    Raises ConfigError when vLLM is missing or refuses the settings, ModelError for a model that it cannot serve here, EngineError
    when it does not start.
    """
    start = _Start(settings, world)
    try:
        return await world.offload(start.run, pool="engines")
    except BaseException:
        start.give_up()
        raise


class _Start:
    """One start, and who gives it up: the thread goes on in vLLM's code, so its processes are taken from it."""

    def __init__(self, settings: VLLMSettings, world: World) -> None:
        self._settings = settings
        self._world = world
        self._is_given_up = threading.Event()
        self._offspring = Offspring()

    def run(self) -> Client:
        """In a thread."""
        with inherited_by_children(child_environment(self._settings.num_threads)), self._offspring:
            import_vllm()
            return self._launch()

    def _launch(self) -> Client:
        from asyncrl.rollout.vllm.llm import LLM, meter_logger

        config, meter = _config_of(self._settings), Meter()
        self._check_wanted()
        llm = _start_llm(config, meter_logger(meter))
        try:
            self._check_wanted()
        except EngineError:
            llm.shutdown(timeout=0)
            raise
        return LLM(llm, meter, _processes(self._offspring.pids()), self._world)

    def _check_wanted(self) -> None:
        if self._is_given_up.is_set():
            raise EngineError("nobody waits for this vLLM any more")

    def give_up(self) -> None:
        """Kill what has been started so far, all of it if the thread has just done its work; vLLM then fails in its thread, and
        nobody hears it."""
        self._is_given_up.set()
        self._offspring.kill()


def _processes(found: Sequence[int]) -> list[Process]:
    """EngineCore is the newest of these children; the workers are its own. None on a system that does not say."""
    if not found:
        return []
    core = found[-1]
    ours = [process for process in multiprocessing.active_children() if process.pid == core]
    workers = [Process(name=f"vLLM's worker {rank}", pid=pid) for rank, pid in enumerate(children(core))]
    return [Process(name="vLLM's EngineCore", pid=core, exit_code=lambda: ours[0].exitcode if ours else None), *workers]


def _config_of(settings: VLLMSettings) -> "VllmConfig":
    """Raises ConfigError, or ModelError, for what vLLM will not do with these settings."""
    from vllm import AsyncEngineArgs

    args: dict[str, Any] = {**engine_args(settings), "additional_config": {NAME: Tether()}}
    try:
        config = AsyncEngineArgs(**args).create_engine_config()
    except Exception as error:  # of many classes: vLLM checks arguments and model in many places
        raise ConfigError(f"vLLM refuses the model {settings.model!r} or its settings: {named_message_of(error)}") from error
    check_head_size(settings.model, config)
    return config


def check_head_size(model: str, config: "VllmConfig") -> None:
    """Raises ModelError. The CPU build finds out at the first request, and dies of it."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size, sizes = config.model_config.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
    if not config.model_config.use_mla and size not in sizes:
        raise ModelError(
            f"{model!r} has attention heads of {size}, and vLLM's CPU build serves {', '.join(map(str, sizes))} only; "
            'use rollout.name = "torch" or another model'
        )


def _start_llm(config: "VllmConfig", logger: type[Any]) -> "AsyncLLM":
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        return AsyncLLM.from_vllm_config(config, disable_log_stats=True, stat_loggers=[logger])
    except AsyncRLError:
        raise
    except Exception as error:  # vLLM raises RuntimeError, TimeoutError, and what a broken build raises
        _let_go(error)
        raise EngineError(f"vLLM did not start: {named_message_of(error)}") from error


def _let_go(error: BaseException | None) -> None:
    """Of the half of an engine that an error keeps alive by the frames that it came from: sockets, and threads of ZeroMQ."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
