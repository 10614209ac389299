"""Imports the user's own modules: what `agent.tools` and `agent.name` name as `module:function` or `module:Class`.

preflight, agents, tools -> [user_code] -> the user's module. They are found as `python script.py` in the working directory would
find them. PYTHONSAFEPATH, which takes that directory off the path, does not change this: naming the module in the configuration is
the permission.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from asyncrl.wording import named_message_of


class UserCodeError(Exception):
    """Why a module of the user cannot be had, in one line; the caller adds the key that named it."""


def import_from_here(name: str) -> ModuleType:
    """The module `name`, from the working directory or the installed packages. Raises UserCodeError.

    One that is imported already is taken as it is, so that a name which the checks have tried costs the event loop nothing.
    """
    if name in sys.modules:
        return sys.modules[name]
    try:
        with _first_on_path(os.getcwd()):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # whatever the user's module raises while it is imported
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise UserCodeError(f"no module named {error.name!r} in {os.getcwd()} or among the installed packages") from error
        raise UserCodeError(f"importing {name} raised {named_message_of(error)}") from error


@contextmanager
def _first_on_path(folder: str) -> Iterator[None]:
    """First while the module is imported; afterwards last, so that what its functions import when they are called is found as well,
    and a `random.py` of the user shadows nothing that the trainer imports later."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
