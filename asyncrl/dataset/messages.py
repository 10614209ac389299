"""The form of a message list: what every chat template can render, and no images or audio for now."""

from asyncrl.errors import DataError
from asyncrl.ports import Json, Messages
from asyncrl.wording import kind_of, shown

MEDIA_COLUMNS = frozenset({"image", "images", "video", "videos", "audio", "audios", "multi_modal_data", "multi_modal_inputs"})


def check_messages(value: Json, *, place: str, key: str) -> Messages:
    """`value`, when it is a non-empty list of messages: a role each, and content that is a text, a list of text parts, or absent
    or null beside tool calls. At least one message says something.

    place: "file, row N"; key: the column's name. Raises DataError naming both, and the message at fault by its position from 0.
    """
    if isinstance(value, str):
        raise DataError(
            f'{place}: {key} is a text, not a list of messages; set data.mapping.prompt = "{{{key}}}", or data.prompt_key to the'
            " column that has the messages"
        )
    if not isinstance(value, list):
        raise DataError(f"{place}: {key} must be a list of messages, got {kind_of(value)}")
    if not value:
        raise DataError(f"{place}: {key} is an empty list; a prompt needs at least one message")
    for position, message in enumerate(value):
        _check_message(message, f"{place}: {key}[{position}]")
    if not any(_says_something(message) for message in value):
        raise DataError(f"{place}: {key} is blank: no message has any text")
    return value


def refuse_media(values: dict[str, Json], *, place: str, where: str = "column") -> None:
    """Raises DataError when the row (or message) has images, video or audio. Empty and null columns are fine."""
    if MEDIA_COLUMNS.isdisjoint(values):
        return
    for name in sorted(MEDIA_COLUMNS & values.keys()):
        if values[name]:
            raise DataError(f"{place}: {where} {name!r} is not empty: rows with images, video or audio are not supported yet")


def _check_message(message: Json, here: str) -> None:
    if not isinstance(message, dict):
        raise DataError(f"{here} must be an object with role and content, got {kind_of(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(f"{here}.role {_complaint(message, 'role', 'a text such as user')}")
    refuse_media(message, place=here, where="key")
    _check_tool_calls(message, here)
    _check_content(message, here)


def _complaint(message: dict[str, Json], name: str, wanted: str) -> str:
    if name not in message:
        return f"is missing; it must be {wanted}"
    return f"must be {wanted}, got {shown(message[name])}"


def _check_tool_calls(message: dict[str, Json], here: str) -> None:
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise DataError(f"{here}.tool_calls {_complaint(message, 'tool_calls', 'a list of objects')}")


def _check_content(message: dict[str, Json], here: str) -> None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if not isinstance(content, list):
        raise DataError(f"{here}.content {_complaint(message, 'content', 'a text or a list of text parts')}")
    for position, part in enumerate(content):
        _check_part(part, f"{here}.content[{position}]")


def _check_part(part: Json, here: str) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise DataError(f"{here} must be an object with a type, got {shown(part)}")
    if part["type"] != "text":
        raise DataError(f"{here} is of type {shown(part['type'])}: rows with images, video or audio are not supported yet")
    if not isinstance(part.get("text"), str):
        raise DataError(f"{here}.text {_complaint(part, 'text', 'a text')}")


def _says_something(message: dict[str, Json]) -> bool:
    content = message.get("content")
    if isinstance(content, list):
        return any(part["text"].strip() for part in content)
    return bool(message.get("tool_calls")) or bool(content and content.strip())
