"""Sampled trajectories as text to read: what the policy was given, what it wrote, and what its tools answered.

trainer -> [trajectories] -> trajectories/step_000012.txt

The text is decoded from the very ids that are trained on, special tokens shown, cut where the response mask changes. Each line
stands behind a bar, so no text can look like a heading; characters that cannot be printed are escaped, so none moves the cursor.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from asyncrl.ports import Decode, Json

_MAX_VALUE = 200
"""Characters of a fact's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A stretch of the response: sampled by the policy, or added by the environment (tool results with the template around)."""

    is_policy: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryText:
    """One trajectory. facts: shown in the heading after the reward, such as num_turns."""

    key: str
    reward: float
    prompt: str
    turns: tuple[Turn, ...]
    facts: Mapping[str, Json] = field(default_factory=dict)


def to_turns(responses: Sequence[int], response_mask: Sequence[bool | int], decode: Decode) -> tuple[Turn, ...]:
    """Cut a response where its mask changes and decode each part.

    responses: ids [R]; response_mask: [R], true on sampled tokens."""
    pairs = zip(responses, response_mask, strict=True)
    parts = groupby(pairs, key=lambda pair: bool(pair[1]))
    return tuple(Turn(is_policy=is_policy, text=decode([token for token, _ in part])) for is_policy, part in parts)


def render_trajectory(trajectory: TrajectoryText) -> str:
    """A heading, then the prompt and the turns, each behind its mark."""
    facts = "".join(f"  {name}={_shorten(value)}" for name, value in trajectory.facts.items())
    parts = [f"=== {_printable(trajectory.key)}  reward={trajectory.reward:g}{facts}", _block("prompt", trajectory.prompt)]
    parts += [_block("policy" if turn.is_policy else "environment", turn.text) for turn in trajectory.turns]
    return "\n".join(parts) + "\n"


def write_trajectories(folder: Path, step: int, trajectories: Iterable[TrajectoryText]) -> Path:
    """Write `folder`/step_000012.txt, whole or not at all; a repeated step replaces its file. Blocking."""
    folder.mkdir(exist_ok=True)
    path = folder / f"step_{step:06d}.txt"
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text("\n".join(render_trajectory(trajectory) for trajectory in trajectories), encoding="utf-8")
    os.replace(unfinished, path)
    return path


def _block(name: str, text: str) -> str:
    return "\n".join([f"--- {name}", *(f"| {_printable(line)}" for line in text.split("\n"))])


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(character: str) -> str:
    # Wide spaces of written languages are not "printable" for Python but do no harm.
    return character if character.isprintable() or character == "\u3000" else character.encode("unicode_escape").decode()


def _shorten(value: Json) -> str:
    text = _printable(str(value))
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."
