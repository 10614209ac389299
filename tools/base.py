"""The Tool protocol, and FunctionTool: a tool made of a plain function by its type hints and docstring.

Place: asyncrl.tools -> agents (which calls tools with deadlines). A tool knows nothing of sessions, tokens or the loop it runs on.
"""

import inspect
import json
from collections.abc import Awaitable, Callable
from typing import Protocol, overload

import msgspec

from asyncrl.ports import Json
from asyncrl.tools.schema import HIDDEN, argument_struct, function_schema


class ToolArgumentError(ValueError):
    """The arguments of a call do not fit the tool's schema; the message says which and how, and is shown to the model."""


class Tool(Protocol):
    """Something the model can call by name. One with a further attribute `is_stateful = True` remembers something of its sessions:
    after a restart they begin again, since nobody can build that again."""

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> Json:
        """OpenAI function format, as chat templates take it: {"type": "function", "function": {name, description, parameters}}."""
        ...

    @property
    def is_async(self) -> bool:
        """True: `call` returns an awaitable. False: `call` may block and is run in a thread."""
        ...

    def check(self, arguments: dict[str, Json]) -> dict[str, Json]:
        """Arguments with defaults filled in. Raises ToolArgumentError."""
        ...

    def call(self, arguments: dict[str, Json], tools_kwargs: dict[str, Json]) -> str | Awaitable[str]:
        """Run with checked arguments. `tools_kwargs` is what the dataset row has for this tool; the model never sees it."""
        ...


class FunctionTool:
    """A function as a Tool. It stays callable as the function it is.

    Raises ToolSpecError when a parameter has no type hint, or one that JSON cannot carry.
    """

    def __init__(self, function: Callable[..., object], *, name: str | None = None) -> None:
        self._function = function
        self.name: str = name or str(getattr(function, "__name__", type(function).__name__))
        self.schema: Json = function_schema(function, self.name)
        self._arguments = argument_struct(function, self.name)
        self.is_async = inspect.iscoroutinefunction(function)
        self.is_stateful = bool(getattr(function, "is_stateful", False))
        self._takes_kwargs = HIDDEN in inspect.signature(function).parameters

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._function(*args, **kwargs)

    def check(self, arguments: dict[str, Json]) -> dict[str, Json]:
        """Raises ToolArgumentError with the name of the argument and what was expected."""
        try:
            checked = msgspec.convert(arguments, self._arguments)
        except msgspec.ValidationError as error:
            raise ToolArgumentError(str(error).replace("`$.", "`").replace("Object ", "the call ")) from None
        return {name: getattr(checked, name) for name in self._arguments.__struct_fields__}

    def call(self, arguments: dict[str, Json], tools_kwargs: dict[str, Json]) -> str | Awaitable[str]:
        """Text of the function's result: strings as they are, everything else as JSON."""
        hidden = {HIDDEN: tools_kwargs} if self._takes_kwargs else {}
        result = self._function(**arguments, **hidden)
        return _awaited_text(result) if inspect.isawaitable(result) else result_text(result)


async def _awaited_text(result: Awaitable[object]) -> str:
    return result_text(await result)


def result_text(result: object) -> str:
    """What the model sees of a result. Raises TypeError for what JSON cannot carry."""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


@overload
def tool(function: Callable[..., object], /) -> FunctionTool: ...
@overload
def tool(*, name: str) -> Callable[[Callable[..., object]], FunctionTool]: ...


def tool(
    function: Callable[..., object] | None = None, /, *, name: str | None = None
) -> FunctionTool | Callable[[Callable[..., object]], FunctionTool]:
    """Decorator: make a tool of a function. Types come from the hints, texts from the docstring (summary and `Args:`).

    @tool
    def weather(city: str, unit: Literal["C", "F"] = "C") -> str:
        \"\"\"Current weather of a city.

        Args:
            city: Name in English.
            unit: Unit of the temperature.
        \"\"\"

    Sync functions run in a thread, async ones on the loop. A keyword-only parameter `tools_kwargs` is not shown to the model: it
    gets what the dataset row has for the tool in `extra_info.tools_kwargs[name]`. Nothing is registered; name the tool in the
    configuration as `module:function`.
    """
    return FunctionTool(function) if function is not None else lambda chosen: FunctionTool(chosen, name=name)
