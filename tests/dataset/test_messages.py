"""Message lists: what a chat template can render passes, the rest is named by place and position."""

import pytest

from asyncrl.dataset import check_messages
from asyncrl.errors import DataError
from asyncrl.ports import Json

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function", "function": {"name": "sum", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [{"role": "system", "content": ""}, USER],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "3", "tool_call_id": "x"}],
        [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
        [{**USER, "tool_calls": None, "images": [], "audio": None}],
    ],
)
def test_what_a_chat_template_can_render_passes_as_it_is(messages: Json) -> None:
    assert check_messages(messages, place="f, row 1", key="prompt") is messages


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (None, "prompt must be a list of messages, got null"),
        ("What is 1 + 1?", 'prompt is a text, not a list of messages; set data.mapping.prompt = "{prompt}"'),
        ({"role": "user"}, "prompt must be a list of messages, got an object"),
        ([], "prompt is an empty list"),
        (["hi"], "prompt[0] must be an object with role and content, got a text"),
        ([USER, None], "prompt[1] must be an object with role and content, got null"),
        ([{"content": "hi"}], "prompt[0].role is missing; it must be a text such as user"),
        ([{"role": None, "content": "hi"}], "prompt[0].role must be a text such as user, got None"),
        ([{"role": "", "content": "hi"}], "prompt[0].role must be a text such as user, got ''"),
        ([{"role": "user"}], "prompt[0].content is missing; it must be a text or a list of text parts"),
        ([{"role": "user", "content": None}], "prompt[0].content must be a text or a list of text parts, got None"),
        ([{"role": "user", "content": 7}], "prompt[0].content must be a text or a list of text parts, got 7"),
        ([USER, {"role": "assistant", "tool_calls": []}], "prompt[1].content is missing"),
        ([USER, {"role": "assistant", "tool_calls": CALL}], "prompt[1].tool_calls must be a list of objects"),
        ([USER, {"role": "assistant", "tool_calls": ["sum"]}], "prompt[1].tool_calls must be a list of objects, got ['sum']"),
        ([{"role": "user", "content": "  \n"}], "prompt is blank: no message has any text"),
        ([{"role": "user", "content": []}], "prompt is blank: no message has any text"),
        ([{"role": "user", "content": [{"type": "text", "text": " "}]}], "prompt is blank"),
        ([{"role": "user", "content": [{"text": "a"}]}], "prompt[0].content[0] must be an object with a type, got {'text': 'a'}"),
        ([{"role": "user", "content": ["a"]}], "prompt[0].content[0] must be an object with a type, got 'a'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "prompt[0].content[0].text is missing; it must be a text"),
        (
            [{**USER, "content": [{"type": "image_url"}]}],
            "prompt[0].content[0] is of type 'image_url': rows with images, video or audio",
        ),
        (
            [{**USER, "images": ["x.png"]}],
            "prompt[0]: key 'images' is not empty: rows with images, video or audio are not supported yet",
        ),
    ],
)
def test_what_it_cannot_is_named_by_place_and_position(messages: Json, says: str) -> None:
    with pytest.raises(DataError) as caught:
        check_messages(messages, place="f, row 1", key="prompt")
    assert str(caught.value).startswith(f"f, row 1: {says}")
    assert "\n" not in str(caught.value)
