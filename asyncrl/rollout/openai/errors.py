"""How a server fails its engine. Loads no aiohttp."""

from asyncrl.errors import ConfigError, EngineError


class ServerMisfitError(ConfigError, EngineError):
    """A server that cannot be used: it is not there, or lacks what an engine needs. Found when the engine is opened."""


class ServerLostError(EngineError):
    """No answer: the connection was refused or broke, or the deadline passed. has_begun: an answer had begun."""

    def __init__(self, message: str, *, has_begun: bool = False) -> None:
        super().__init__(message)
        self.has_begun = has_begun


class ServerRefusedError(EngineError):
    """The server answered, but not with what was asked for. status: of HTTP, or what the server's own error says."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
