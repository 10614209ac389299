"""Agent loops by name. Imports no torch, so that a wrong name is told before anything heavy is loaded.

Place: preflight, session -> [registry] -> the loop's own module.
"""

import inspect
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError
from asyncrl.user_code import UserCodeError, import_from_here
from asyncrl.wording import named_message_of, nearest

if TYPE_CHECKING:
    from asyncrl.agents.loop import AgentLoop

BUILT_IN: dict[str, str] = {
    "single_turn": "asyncrl.agents.single_turn:SingleTurn",
    "tool_agent": "asyncrl.agents.tool_agent:ToolAgent",
}


def check_agent_name(name: str) -> None:
    """Raises ConfigError, with the nearest name, unless `name` is built in or a `module:Class` that can be loaded."""
    if name not in BUILT_IN:
        load_agent_loop(name)


def load_agent_loop(name: str) -> "AgentLoop":
    """`single_turn`, `tool_agent` or `module:Class` (made without arguments). Raises ConfigError."""
    module_name, colon, attribute = BUILT_IN.get(name, name).partition(":")
    if not (module_name and colon and attribute):
        known = f"built in: {', '.join(BUILT_IN)}; your own: module:Class"
        raise ConfigError(f"agent.name = {name!r} is no agent loop{nearest(name, BUILT_IN)} ({known})")
    try:
        module = import_from_here(module_name)
    except UserCodeError as error:
        raise ConfigError(f"agent.name = {name!r}: {error}") from error
    if not hasattr(module, attribute):
        hint = nearest(attribute, [entry for entry in dir(module) if not entry.startswith("_")])
        raise ConfigError(f"agent.name = {name!r}: {module.__file__ or module_name} has no {attribute!r}{hint}")
    made = _make(getattr(module, attribute), name)
    if not inspect.iscoroutinefunction(getattr(made, "run", None)):
        raise ConfigError(f"agent.name = {name!r} has no `async def run(prompt, context)`")
    loop: AgentLoop = made
    return loop


def _make(kind: Any, name: str) -> Any:
    try:
        return kind()
    except Exception as error:  # whatever the user's class raises
        raise ConfigError(f"agent.name = {name!r} cannot be made without arguments: {named_message_of(error)}") from error
