"""An exception of a rank, raised again in the controller as itself: pickled where it can be, else as its nearest error of ours."""

import traceback
from dataclasses import dataclass

from asyncrl import errors
from asyncrl.cluster import wire
from asyncrl.errors import AsyncRLError, RankError
from asyncrl.wording import message_of, named_message_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """pickled: the exception, b"" where it cannot be; kind, message: of the stand-in; trace: the rank's traceback as text."""

    pickled: bytes
    kind: str
    message: str
    trace: str

    @property
    def likeness(self) -> tuple[str, str]:
        """Ranks that raised alike have it in common."""
        return self.kind, self.message


class RemoteTraceback(Exception):
    """The cause of an exception that came from a rank: where it was raised there."""

    def __str__(self) -> str:
        return str(self.args[0])


def pack(error: BaseException) -> Raised:
    """Never raises, whatever the exception is made of."""
    ours = next((each.__name__ for each in type(error).__mro__ if each.__module__ == errors.__name__), "")
    message = message_of(error) if ours else named_message_of(error)
    trace = "".join(traceback.format_exception(error))
    return Raised(pickled=_pickled(error), kind=ours or RankError.__name__, message=message, trace=trace)


def _pickled(error: BaseException) -> bytes:
    if not isinstance(error, Exception):  # SystemExit and the like end a rank's work, not the controller
        return b""
    try:
        data = wire.encode(error)
        wire.decode(data)  # a constructor that takes other arguments fails here
    except Exception:  # whatever the class's own reduction raises
        return b""
    return data


def unpack(raised: Raised, rank: int) -> Exception:
    """The exception, with the rank's traceback as its cause."""
    error = _loaded(raised.pickled) or _stand_in(raised, rank)
    error.__cause__ = RemoteTraceback(f"in rank {rank}:\n{raised.trace}")
    return error


def _loaded(data: bytes) -> Exception | None:
    try:
        error = wire.decode(data) if data else None
    except Exception:  # whatever importing and making it raises here
        return None
    return error if isinstance(error, Exception) else None


def _stand_in(raised: Raised, rank: int) -> Exception:
    kind: type[AsyncRLError] = getattr(errors, raised.kind)
    if kind is not RankError:
        return kind(raised.message)
    return RankError(f"rank {rank} raised {raised.message}; mend it, and go on with --resume")
