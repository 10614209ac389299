"""Tools that a model can call: the protocol, the `tool` decorator, loading by name, and the built-in ones. Loads no torch."""

from asyncrl.tools.base import FunctionTool, Tool, ToolArgumentError, result_text, tool
from asyncrl.tools.registry import BUILT_IN, load_tool, load_tools

__all__ = ["BUILT_IN", "FunctionTool", "Tool", "ToolArgumentError", "load_tool", "load_tools", "result_text", "tool"]
