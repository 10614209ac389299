"""Who calls which verb of the store: what the source of every room says.

asyncrl, agents, replay (text) -> [callers] -> docs/data-protocol.md
"""

import re
from pathlib import Path

import asyncrl
from asyncrl.protocol_page.lives import verbs
from asyncrl.reference import markdown

_PRODUCT = Path(asyncrl.__path__[0])
_ROOMS = {"agents": _PRODUCT / "agents", "replay": _PRODUCT / "replay", "asyncrl": _PRODUCT}
"""Name on the page -> folder; the links are folders of their own."""
_APART = ("transfer_queue", "protocol_page", "agents", "replay", "tools")
"""Folders below asyncrl that are not read: the store, who watches it, and the links."""


def callers() -> dict[str, list[str]]:
    """Verb -> files in which something called `queue` is asked for it."""
    found: dict[str, list[str]] = {verb: [] for verb in verbs()}
    for room, folder in _ROOMS.items():
        for file in sorted(folder.rglob("*.py")):
            path = file.relative_to(folder)
            if room == "asyncrl" and path.parts[0] in _APART:
                continue
            for verb in set(re.findall(r"queue\.(\w+)", file.read_text(encoding="utf-8"))) & found.keys():
                found[verb].append(f"{room}/{path}")
    return found


def callers_table() -> str:
    rows = [(verb, ", ".join(f"`{file}`" for file in files) or "nobody in a run") for verb, files in callers().items()]
    return markdown(("verb", "called by"), rows)
