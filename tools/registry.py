"""load_tools: from the names in the configuration to tools. Nothing is registered by importing a module.

Place: cli and trainer -> [registry] -> agents. A built-in is a name in the table below; anything else is `module:function`.
"""

import inspect
from collections.abc import Sequence
from typing import TypeGuard

from asyncrl.errors import ToolSpecError
from asyncrl.tools.base import FunctionTool, Tool
from asyncrl.user_code import UserCodeError, import_from_here
from asyncrl.wording import nearest

BUILT_IN: dict[str, str] = {
    "calculator": "asyncrl.tools.calculator:calculator",
}
"""Name in the configuration -> where the tool lives. Imported when it is asked for."""


def load_tools(specs: Sequence[str]) -> dict[str, Tool]:
    """Tools by their name for the model, in the order given.

    Raises ToolSpecError with one line for a tool that does not exist, does not import, cannot be described, or is named twice.
    """
    tools: dict[str, Tool] = {}
    for spec in specs:
        loaded = load_tool(spec)
        if loaded.name in tools:
            raise ToolSpecError(f"agent.tools: two tools are called {loaded.name!r}; the model could not tell them apart")
        tools[loaded.name] = loaded
    return tools


def load_tool(spec: str) -> Tool:
    """One tool by registered name or `module:function`; a plain function is made a tool."""
    path = BUILT_IN.get(spec, spec)
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        known = f"built in: {', '.join(BUILT_IN)}; your own: module:function"
        raise ToolSpecError(f"agent.tools: no tool named {spec!r}{nearest(spec, BUILT_IN)} ({known})")
    found = _find(module_name, attribute, spec)
    if is_tool(found):
        return found
    if inspect.isclass(found) or not callable(found):
        raise ToolSpecError(f"agent.tools: {spec!r} is a {type(found).__name__}, not a function or tool")
    try:
        return FunctionTool(found)
    except ToolSpecError as error:
        raise ToolSpecError(f"agent.tools: {spec!r}: {error}") from error


def is_tool(value: object) -> TypeGuard[Tool]:
    """Does an object have what the Tool protocol asks for? (An instance: a class is no tool.)"""
    return not inspect.isclass(value) and all(hasattr(value, name) for name in ("name", "schema", "is_async", "check", "call"))


def _find(module_name: str, attribute: str, spec: str) -> object:
    try:
        module = import_from_here(module_name)
    except UserCodeError as error:
        raise ToolSpecError(f"agent.tools: {spec!r}: {error}") from error
    if not hasattr(module, attribute):
        public = [name for name in dir(module) if not name.startswith("_")]
        raise ToolSpecError(f"agent.tools: {spec!r}: module {module_name!r} has no {attribute!r}{nearest(attribute, public)}")
    return getattr(module, attribute)
