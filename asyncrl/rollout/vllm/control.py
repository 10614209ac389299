"""LLMControl: a publication's commands for an AsyncLLM of this process. Imports vllm: imported by who has started one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.v1.engine.async_llm import AsyncLLM

from asyncrl.errors import EngineError
from asyncrl.ports import Json
from asyncrl.wording import named_message_of


class LLMControl:
    """A Control (see rollout/publication/control.py) of `llm`."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def pause(self) -> None:
        with _told("pause"):
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        with _told("resume"):
            await self._llm.resume_generation()

    async def init_weight_transfer(self, init_info: Mapping[str, Json]) -> None:
        with _told("init_weight_transfer"):
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(init_info)))

    async def start_weight_update(self) -> None:
        with _told("start_weight_update"):
            await self._llm.start_weight_update()

    async def update_weights(self, update_info: Mapping[str, Json]) -> None:
        with _told("update_weights"):
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=dict(update_info)))

    async def finish_weight_update(self, version: str) -> None:
        with _told("finish_weight_update"):
            await self._llm.finish_weight_update(version)

    async def set_version(self, version: str) -> None:
        with _told("set_version"):
            await self._llm.update_weight_version(version)

    async def reset_caches(self) -> None:
        with _told("reset_caches"):
            if not await self._llm.reset_prefix_cache(reset_running_requests=True):
                raise EngineError("vLLM kept its prefix cache: it would be of old weights")

    async def collective_rpc(self, method: str, kwargs: Mapping[str, Json]) -> list[Json]:
        with _told(method):
            return list(await self._llm.collective_rpc(method, kwargs=dict(kwargs)))


@contextmanager
def _told(what: str) -> Iterator[None]:
    """vLLM raises Exception itself for what a worker refused, and EngineDeadError when there is none left."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # of whatever class; it goes on as ours
        raise EngineError(f"vLLM failed at {what}: {named_message_of(error)}") from error
