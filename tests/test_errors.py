"""The error tree is the one that its docstring draws."""

import pickle
import re
from pathlib import Path

import pytest

import asyncrl
from asyncrl import errors

CLASSES = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.AsyncRLError)}


def _drawn() -> dict[str, tuple[str, str | None]]:
    """class -> (parent in the picture, built-in in parentheses)."""
    found: dict[str, tuple[str, str | None]] = {}
    parents = ["AsyncRLError"]
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"([│ ]*)[├└]── (\w+)(?: \((\w+)\))?", line):
            depth = len(match[1]) // 4 + 1
            parents[depth:] = [match[2]]
            found[match[2]] = (parents[depth - 1], match[3])
    return found


def test_the_picture_shows_every_class_where_it_is() -> None:
    drawn = _drawn()
    assert set(drawn) == set(CLASSES) - {"AsyncRLError"}
    for name, (parent, builtin) in drawn.items():
        bases = [base.__name__ for base in CLASSES[name].__bases__]
        assert bases == [parent, *([builtin] if builtin else [])], name


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES)
def test_a_message_is_a_sentence_and_survives_a_process_border(kind: type[errors.AsyncRLError]) -> None:
    error = kind("key 'a' is missing")
    assert str(error) == "key 'a' is missing"  # a bare KeyError would print quotes around it
    assert str(kind()) == ""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert kind.__doc__


def test_the_tree_grows_nowhere_else() -> None:
    root = Path(asyncrl.__path__[0])
    bases = "|".join(CLASSES)
    strays = [
        f"{path.name}: {found[0]}"
        for path in root.rglob("*.py")
        if path.name != "errors.py"
        for found in re.finditer(rf"^class \w+\(.*\b({bases})\b.*\):", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert strays == []
