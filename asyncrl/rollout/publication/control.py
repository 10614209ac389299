"""Control: what a vLLM is told around a publication, whether it runs in our process or behind HTTP.

Publisher -> carrier -> [Control] -> vLLM, whose worker processes load the weights
"""

from collections.abc import Mapping
from typing import Protocol

from asyncrl.ports import Json


class Control(Protocol):
    """Every method raises EngineError when the vLLM refuses, fails or is gone, with what it said. The caller has the deadline."""

    async def pause(self) -> None:
        """No step starts until `resume`; returns when the one in flight is done. Requests in flight are kept, and so are caches."""
        ...

    async def resume(self) -> None: ...

    async def init_weight_transfer(self, init_info: Mapping[str, Json]) -> None:
        """Once, before the first update."""
        ...

    async def start_weight_update(self) -> None: ...

    async def update_weights(self, update_info: Mapping[str, Json]) -> None: ...

    async def finish_weight_update(self, version: str) -> None:
        """The weights are whole, and tokens from now on are of `version`."""
        ...

    async def set_version(self, version: str) -> None:
        """Tokens from now on are of `version`."""
        ...

    async def reset_caches(self) -> None:
        """Forget the prefix cache, and the KV of running requests: it is computed anew when they go on."""
        ...

    async def collective_rpc(self, method: str, kwargs: Mapping[str, Json]) -> list[Json]:
        """Call a method of every worker. Returns their results; over HTTP, those that are no list or object come as text."""
        ...
