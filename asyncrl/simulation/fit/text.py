"""A scenario as a TOML file that a person reads: each measured key with a comment that says where it came from.

scenario's tree, comments -> [text] -> file. Distributions stay on one line. It loads again as the same scenario.
"""

from collections.abc import Iterator, Mapping

import tomli_w

from asyncrl.ports import Json


def as_text(tree: Mapping[str, Json], comments: Mapping[str, str], head: str) -> str:
    """comments: by key (`sim.engine.decode_step_s`). head: comment lines at the top, without their `#`."""
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    return "\n".join([*lines, *_section(tree, "", comments)]) + "\n"


def _section(tree: Mapping[str, Json], path: str, comments: Mapping[str, str]) -> Iterator[str]:
    """Its own keys first, as TOML wants it, then what is inside."""
    inner = {name: value for name, value in tree.items() if _is_section(value)}
    own = {name: value for name, value in tree.items() if name not in inner}
    if path and own:
        yield f"\n[{path}]"
    for name, value in own.items():
        key = f"{path}.{name}" if path else name
        if key in comments:
            yield f"# {comments[key]}"
        yield f"{name} = {_inline(value)}"
    for name, value in inner.items():
        key = f"{path}.{name}" if path else name
        if isinstance(value, dict):
            yield from _section(value, key, comments)
            continue
        for number, entry in enumerate(value):
            yield f"\n{f'# {comments[key]}{chr(10)}' if key in comments and not number else ''}[[{key}]]"
            yield from (f"{inside} = {_inline(held)}" for inside, held in entry.items())


def _is_section(value: Json) -> bool:
    """A table that is no random number; or a list of such."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(entry, dict) for entry in value)
    return isinstance(value, dict) and "kind" not in value


def _inline(value: Json) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_inline(held)}" for name, held in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_inline(entry) for entry in value) + "]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:.0f}"
    return tomli_w.dumps({"x": value}).partition("=")[2].strip()
