"""Addresses of endpoints and names of variables without secrets in them, since configurations are kept and shown."""

import os
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from asyncrl.errors import ConfigError, UserError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def plain_url(url: str, *, example: str = "http://host:port/v1") -> str:
    """Raises ConfigError for what is no http(s) address, and for one that may hold a secret."""
    if any(mark in url for mark in "@?#"):
        raise ConfigError("give scheme, host, port and path alone; a key goes into the variable that api_key_env names")
    try:
        parts = urlsplit(url)
        is_plain = not url or (parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0)
        is_plain = is_plain and url.isprintable() and " " not in url
    except ValueError:  # a port that is no number
        is_plain = False
    if not is_plain:
        raise ConfigError(f"{url!r} is no address of the form {example}")
    return url.rstrip("/")


def _server_url(url: str) -> str:
    url = plain_url(url, example="http://host:port")
    if not url:
        raise ConfigError("an address is empty; give one of the form http://host:port")
    if url.endswith("/v1"):
        raise ConfigError(f"{url!r}: leave out /v1, which is added to it where it belongs")
    return url


def _variable(name: str) -> str:
    """Raises ConfigError, without repeating it, for what is no variable's name: it may be the key itself."""
    if name and not (name.isascii() and name.isidentifier()):
        raise ConfigError("give the name of an environment variable, such as JUDGE_API_KEY; the key itself is its value")
    return name


ServerUrl = Annotated[str, AfterValidator(_server_url)]
"""Where a server's routes begin."""
Variable = Annotated[str, AfterValidator(_variable)]
"""Name of an environment variable."""


def is_this_machine(url: str) -> bool:
    return urlsplit(url).hostname in _LOOPBACK


def read_key(variable: str, *, where: str, error: type[UserError]) -> str:
    """The key in an environment variable; "": none. where: the configuration's key that names it. Raises `error` without showing
    the key."""
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise error(f"{where} = {variable!r}: there is no such environment variable, or it is empty")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise error(f"{where} = {variable!r}: its value is no key; it has characters that no key has")
    return key
