"""From the text of `reward.function` to the function itself.

A name is a built-in rule; `module:function` is imported, with the run's working directory first on the module path, as `python
script.py` in that directory would find it (PYTHONSAFEPATH, which takes that directory off the path, does not change this:
naming the module in the configuration is the permission). Runs in the worker process; in the trainer's only for `async def`
functions.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable

from asyncrl.errors import RewardSpecError
from asyncrl.ports import Json
from asyncrl.rewards.rules import RULES
from asyncrl.wording import describe_error, nearest

RewardFunction = Callable[..., Json]
"""f(data_source, solution_str, ground_truth, extra_info), called by keyword; a number or a dict with "score", or an awaitable
of it."""

_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def check_name(function: str) -> None:
    """Raises RewardSpecError when `function` is neither a rule nor of the form module:function. Imports nothing."""
    module, colon, attribute = function.partition(":")
    if function in RULES:
        return
    if not colon:
        hint = nearest(function, RULES)
        raise RewardSpecError(f"reward.function = {function!r} is neither a rule ({', '.join(RULES)}) nor module:function{hint}")
    if not all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")]):
        raise RewardSpecError(f"reward.function = {function!r} is not of the form module:function, such as my_rewards:score")


def load_function(function: str) -> RewardFunction:
    """The rule, or the function imported from the module path as it is, checked to be callable with the four arguments.

    Raises RewardSpecError, one line, for what is missing, raises at import, or has another signature.
    """
    check_name(function)
    if function in RULES:
        return RULES[function]
    module, _, attribute = function.partition(":")
    found = _attribute(_module(module, function), attribute, function)
    if not callable(found):
        raise RewardSpecError(f"reward.function = {function!r} is {type(found).__name__}, not a function")
    _check_signature(found, function)
    return found


def load_beside(function: str, folder: str) -> RewardFunction:
    """`load_function` with `folder` first on the module path, for the import only: later, a `random.py` of the user's folder
    must not shadow a module that the trainer imports. So a function that runs in the trainer imports its neighbours at the top
    of its module."""
    sys.path.insert(0, folder)
    try:
        return load_function(function)
    finally:
        sys.path.remove(folder)


def is_async(function: RewardFunction) -> bool:
    """Whether calling it gives a coroutine: an `async def`, or an object with such a `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _module(name: str, function: str) -> object:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            reason = f"no module named {error.name!r} in {os.getcwd()} or among the installed packages"
        else:
            reason = f"importing {name} raised {describe_error(error)}"
        raise RewardSpecError(f"reward.function = {function!r}: {reason}") from error


def _attribute(module: object, path: str, function: str) -> object:
    found = module
    for name in path.split("."):
        if not hasattr(found, name):
            hint = nearest(name, [entry for entry in dir(found) if not entry.startswith("_")])
            place = getattr(module, "__file__", None) or repr(module)
            raise RewardSpecError(f"reward.function = {function!r}: {place} has no {name!r}{hint}")
        found = getattr(found, name)
    return found


def _check_signature(found: RewardFunction, function: str) -> None:
    try:
        signature = inspect.signature(found)
    except ValueError:  # a C function without a signature: the first call will tell
        return
    try:
        signature.bind(**dict.fromkeys(_ARGUMENTS))
    except TypeError as error:
        call = f"({', '.join(_ARGUMENTS)}) by keyword"
        reason = f"cannot be called with {call}: {error}; it takes {signature}"
        raise RewardSpecError(f"reward.function = {function!r} {reason}") from error
