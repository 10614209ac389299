"""Tables as plain text: what a command prints looks the same in a terminal, a pipe and a file.

trace_command, journal's summary -> [text_tables] -> cli
"""

import io
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

_NARROWEST = 160
"""Characters: the table of trajectories. In fewer, words would be cut; a terminal that breaks whole lines reads better."""

_WIDEST = 400
"""Characters; no table needs as many."""


def as_text(parts: Iterable[str | Table], width: int | None) -> str:
    """Lines of text, which are never broken, and tables. width: of the terminal, whose characters the columns of a table share
    unless it is too narrow; None: a file or a pager, where they take as many as they need.
    """
    out = io.StringIO()
    console = Console(
        file=out,
        width=_WIDEST if width is None else max(width, _NARROWEST),
        color_system=None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
