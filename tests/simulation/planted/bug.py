"""A planted bug: a variant of the controller that is wrong in one place, and that the oracles must catch.

A bug replaces functions or methods of the product for as long as it is planted. Nothing here knows how it will be caught.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

Plant = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """`what`: in one line. `provoke`: trouble at the edges that it needs, which the product without it must survive. `changes`:
    overrides of the scenario in which it can be seen."""

    name: str
    what: str
    plant: Plant
    provoke: Plant | None = None
    changes: tuple[str, ...] = ()


ASYNC = ("trainer.mode=async", "trainer.max_staleness=2")
BUGS: dict[str, Bug] = {}
"""By name, in the order of their modules."""


def bug(
    what: str, *, provoke: Plant | None = None, changes: tuple[str, ...] = ()
) -> Callable[[Callable[[], Iterator[None]]], Plant]:
    """Lists the decorated generator, which plants, yields and takes the bug out again, under its own name."""

    def add(function: Callable[[], Iterator[None]]) -> Plant:
        plant = contextmanager(function)
        BUGS[function.__name__] = Bug(name=function.__name__, what=what, plant=plant, provoke=provoke, changes=changes)
        return plant

    return add


@contextmanager
def replaced(owner: Any, **by_name: Any) -> Iterator[None]:
    """Attributes of a class or module are these inside the block."""
    with ExitStack() as stack:
        for name, value in by_name.items():
            stack.callback(setattr, owner, name, owner.__dict__[name])
            setattr(owner, name, value)
        yield
