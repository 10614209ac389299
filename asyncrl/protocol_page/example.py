"""One trajectory with an observation in its middle, made by the agents' own code: what the four lengths count.

agents.rows -> [example] -> docs/data-protocol.md
"""

from collections.abc import Sequence

from asyncrl.agents.loop import AgentLoopOutput
from asyncrl.agents.rows import Rows, rows_of
from asyncrl.fields import CATALOGUE, TAGS, Axis
from asyncrl.ports import Prompt
from asyncrl.reference import markdown

OUTPUT = AgentLoopOutput(
    prompt_ids=(11, 12, 13, 14),
    response_ids=(21, 22, 23, 31, 32, 24, 25),
    response_mask=(1, 1, 1, 0, 0, 1, 1),
    response_logprobs=(-0.25, -0.5, -0.125, 0.0, 0.0, -0.75, -0.5),
    token_versions=(7, 7, 7, -1, -1, 8, 8),
    num_turns=2,
    reward_score=1.0,
)
"""Two turns of a policy, 3 and 2 tokens, with the 2 tokens of a tool's answer and a publication of weights between them."""


def rows() -> Rows:
    """Key, columns and tag of the example, as the store gets them."""
    return rows_of(Prompt(uid="a1b2", messages=[], data_source="example"), 0, [OUTPUT], version=7)


def columns_text() -> str:
    """The ragged columns on one grid: the prompt's entries over the first P positions, the response's over the R after them."""
    given = rows()
    entries = {name: _texts(values[0]) for name, values in given.fields.items() if CATALOGUE[name].axis is not Axis.NONE}
    width = 1 + max(len(text) for texts in entries.values() for text in texts)
    lines = [_line(name, CATALOGUE[name].axis, texts, width) for name, texts in entries.items()]
    return "\n".join(["```text", f"trajectory {given.keys[0]}", "", *lines, "```"])


def _line(name: str, axis: Axis, texts: Sequence[str], width: int) -> str:
    skipped = len(OUTPUT.prompt_ids) if axis is Axis.RESPONSE else 0
    return f"{name:<18} {axis:<8}" + " " * width * skipped + "".join(f"{text:>{width}}" for text in texts)


def _texts(row: Sequence[float]) -> list[str]:
    return [f"{float(value):g}" for value in row]


def tags_table() -> str:
    """The tag of the example."""
    told = [(name, str(value).lower(), TAGS[name].meaning) for name, value in rows().tags[0].items()]
    return markdown(("tag", "here", "meaning"), told)
