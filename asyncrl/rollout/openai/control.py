"""HTTPControl: a publication's commands for a vLLM server, over its development routes (VLLM_SERVER_DEV_MODE=1).

Publisher -> [HTTPControl] -> Http -> vLLM

Each call has the deadline of control calls. Those that may be repeated are tried again when their connection breaks.
"""

from collections.abc import Mapping

from asyncrl.errors import EngineError
from asyncrl.ports import Json
from asyncrl.rollout.openai.http import Http


class HTTPControl:
    """A Control (see rollout/publication/control.py) of the server behind `http`."""

    def __init__(self, http: Http) -> None:
        self._http = http

    async def pause(self) -> None:
        await self._http.call("POST", "/pause", params={"mode": "keep", "clear_cache": "false"}, may_repeat=True)

    async def resume(self) -> None:
        await self._http.call("POST", "/resume", may_repeat=True)

    async def init_weight_transfer(self, init_info: Mapping[str, Json]) -> None:
        await self._http.call("POST", "/init_weight_transfer_engine", {"init_info": dict(init_info)})

    async def start_weight_update(self) -> None:
        await self._http.call("POST", "/start_weight_update")

    async def update_weights(self, update_info: Mapping[str, Json]) -> None:
        await self._http.call("POST", "/update_weights", {"update_info": dict(update_info)})

    async def finish_weight_update(self, version: str) -> None:
        await self._http.call("POST", "/finish_weight_update", {"weight_version": version})

    async def set_version(self, version: str) -> None:
        await self._http.call("POST", "/update_weight_version", {"new_version": version}, may_repeat=True)

    async def reset_caches(self) -> None:
        answer = await self._http.call("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"}, may_repeat=True)
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise EngineError(self._http.told("the server kept its prefix cache: it would be of old weights"))

    async def collective_rpc(self, method: str, kwargs: Mapping[str, Json]) -> list[Json]:
        answer = await self._http.call("POST", "/collective_rpc", {"method": method, "kwargs": dict(kwargs)})
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise EngineError(self._http.told(f"/collective_rpc answered {method!r} without results"))
        return results
