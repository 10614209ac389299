"""Tables as plain text: what a command prints looks the same in a terminal, a pipe and a file.

trace_command, journal's summary -> [text_tables] -> cli
"""

import io
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

_WIDEST = 400
"""Characters; no table needs as many."""


def as_text(parts: Iterable[str | Table], width: int | None) -> str:
    """Lines of text, which are never broken, and tables, whose columns share `width` characters; None: as many as they need."""
    out = io.StringIO()
    console = Console(file=out, width=width or _WIDEST, color_system=None, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
