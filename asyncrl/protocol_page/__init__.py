"""The generated parts of docs/data-protocol.md: every table and diagram of it that the code can tell by itself.

catalogue, errors, invariants, stages, a store that is watched -> [protocol_page] -> docs/generate.py

The prose of the page is written by hand. Between `<!-- generated: NAME -->` and `<!-- end -->` stands what `BLOCKS[NAME]` returns;
a test fails while the two differ. Loads torch, which `asyncrl fields` does not: that prints from `asyncrl/reference.py`.
"""

import re
from collections.abc import Callable

from asyncrl.protocol_page import callers, example, store, tables

BLOCKS: dict[str, Callable[[], str]] = {
    "fields-of-a-row": tables.fields_of_a_row,
    "fields-of-a-session": tables.fields_of_a_session,
    "fields-of-a-step": tables.fields_of_a_step,
    "fields-reserved": tables.fields_reserved,
    "example": example.columns_text,
    "example-tags": example.tags_table,
    "tags": tables.tags,
    "leases": tables.leases,
    "group-states": tables.group_states,
    "life": store.life_diagram,
    "endings": store.endings_table,
    "verbs": store.verbs_table,
    "callers": callers.callers_table,
    "operations": store.operations_table,
    "settings": tables.settings,
    "stages": tables.stages_table,
    "invariants": tables.invariants,
    "errors": tables.errors_table,
}
"""Name -> Markdown without a newline at its end."""

_BLOCK = re.compile(r"(<!-- generated: (\S+) -->\n)(?:(?!<!-- ).*\n)*(<!-- end -->)")


def fill(page: str) -> str:
    """The page with every block as the code has it now. Raises KeyError for a block of another name."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]()}\n\n{found[3]}", page)
