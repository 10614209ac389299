"""Values that several ports speak of."""

from collections.abc import Callable
from typing import Any

Json = Any
"""A value that came from outside as JSON: None, bool, int, float, str, list or dict of these."""

Messages = list[dict[str, Json]]
"""Chat messages as Hugging Face templates take them: each has `role` and `content`, perhaps `tool_calls`."""

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens kept."""
