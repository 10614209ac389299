"""Prompts as the template gives them, environment text that can never become control tokens, and templates that are refused."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.agents.chat_template import ChatTemplate, load_chat_template, load_codec
from asyncrl.agents.text_codec import TextCodec, choose_guard
from asyncrl.config import ModelConfig
from asyncrl.errors import ModelError
from asyncrl.ports import Json

USER = [{"role": "user", "content": "hello <tool_call>"}]
SCHEMA: Json = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
SPELLINGS = ["<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "</tool_response>", "<|endoftext|>"]
ENVIRONMENT = st.lists(
    st.sampled_from([*SPELLINGS, "<", "|", "im_end", "\n", " ", "é", "7", "\U0010fffd", "\ud800"]), max_size=8
).map("".join)


def test_prompt_ids_are_what_the_library_gives(template: ChatTemplate, tokenizer: PreTrainedTokenizerFast) -> None:
    schemas = json.loads(json.dumps([SCHEMA]))
    ours = ChatTemplate(template.codec, tool_schemas=schemas).prompt_ids(USER)
    assert ours == tokenizer.apply_chat_template(USER, tools=schemas, add_generation_prompt=True, return_dict=False)
    assert template.codec.control["<tool_call>"] in ours  # the operator's own text may be control tokens


def test_environment_ids_begin_after_the_end_token_and_end_with_the_generation_prompt(template: ChatTemplate) -> None:
    ids = template.environment_ids([{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}])
    assert template.decode(ids) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@given(text=ENVIRONMENT)
def test_environment_text_never_yields_a_control_token(template: ChatTemplate, text: str) -> None:
    codec = template.codec
    harmless = _control_in(codec, template.environment_ids([{"role": "tool", "content": "x"}]))
    ids = template.environment_ids([{"role": "tool", "content": text}])
    assert _control_in(codec, ids) == harmless
    clean = text.replace("\ud800", "�")
    assert clean in codec.decode(ids)


@given(text=ENVIRONMENT)
def test_plain_encoding_never_yields_a_control_token(codec: TextCodec, text: str) -> None:
    clean = text.replace("\ud800", "")
    ids = codec.encode_plain(clean)
    assert not codec.control_ids.intersection(ids)
    assert codec.decode(ids) == clean


def test_every_string_of_a_message_is_guarded(template: ChatTemplate) -> None:
    message = {"role": "tool", "name": "<|im_end|>", "content": "x", "parts": [{"<tool_call>": ["</tool_call>"]}]}
    guarded = json.dumps(template.codec.guard_message(message, "\U0010fffd"))
    assert not any(spelling in guarded for spelling in SPELLINGS)
    assert json.loads(guarded)["role"] == "tool"


def test_the_guard_is_a_character_that_no_text_has() -> None:
    assert choose_guard("x") != choose_guard(choose_guard("x"))
    with pytest.raises(ModelError, match="private-use"):
        choose_guard("".join(map(chr, range(0x10FF00, 0x110000))))


def test_a_word_level_tokenizer_does_not_look_control_tokens_up() -> None:
    words = ["[unk]", "<end>", "<tool>", "user", "a", "x", "assistant"]
    model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[unk]"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=model, unk_token="[unk]", eos_token="<end>", additional_special_tokens=["<tool>", "user"]
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}assistant"
    template = ChatTemplate(TextCodec(tokenizer))
    ids = template.environment_ids([{"role": "user", "content": "a <tool> user <end> a"}])
    assert ids == [3, 4, 0, 0, 0, 4, 1, 6]  # what spells a control token is an unknown word


def test_control_tokens_of_one_character_are_guarded_too(tokenizer: PreTrainedTokenizerFast) -> None:
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="⏹")  # type: ignore[no-untyped-call]
    own.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}⏹{% endfor %}assistant:"
    template = ChatTemplate(TextCodec(own))
    assert template.end_token == "⏹"
    ids = template.environment_ids([{"role": "user", "content": "a⏹b⏹"}])
    assert ids.count(template.end_token_id) == 1
    assert template.decode(ids) == "user: a⏹b⏹⏹assistant:"


def test_sampled_turns_are_decoded_without_their_stop_token_only(template: ChatTemplate) -> None:
    ids = template.encode_assistant("<tool_call>x</tool_call>")
    assert template.decode_turn(ids) == "<tool_call>x</tool_call>"
    assert template.decode_turn(ids[:-1]) == "<tool_call>x</tool_call>"
    assert template.decode_turn([]) == ""


IGNORES_TOOLS = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
NO_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
DROPS_RESULTS = "{{ tools }}{% for m in messages if m.role != 'tool' %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
REFUSES_ROLE = (
    "{{ tools }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}"
)
BROKEN = "{% for m in messages %}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (IGNORES_TOOLS, "ignores tools"),
        (NO_END, "no end token"),
        (DROPS_RESULTS, "drops messages of role 'tool'"),
        (REFUSES_ROLE, "no tools"),
        (BROKEN, "cannot render"),
        ("{{ 1 / 0 }}", "cannot render .*division by zero"),
    ],
)
def test_a_template_that_cannot_serve_tools_is_refused_in_one_line(
    text: str, reason: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "own.jinja").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=reason) as caught:
        load_chat_template(ModelConfig(path=str(tmp_path), chat_template=str(tmp_path / "own.jinja")), [SCHEMA])
    assert "\n" not in str(caught.value)


def test_a_template_without_tools_serves_runs_without_tools(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "own.jinja").write_text(IGNORES_TOOLS, encoding="utf-8")
    loaded = load_chat_template(ModelConfig(path=str(tmp_path), chat_template=str(tmp_path / "own.jinja")))
    assert loaded.decode(loaded.prompt_ids([{"role": "user", "content": "x"}])) == "user: x<|im_end|>"


def test_a_folder_serves_its_own_template_and_the_models_stop_tokens(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}', encoding="utf-8")
    loaded = load_chat_template(ModelConfig(path=str(tmp_path)), [SCHEMA])
    assert loaded.stop_token_ids == (2, 0)
    assert (loaded.end_token, loaded.end_token_id) == ("<|im_end|>", 2)


@pytest.mark.parametrize(
    "text", ["{}", "garbage", "", '{"version": "1.0", "added_tokens": [], "model": {"type": "nope"}}', '{"added_tokens": []}']
)
def test_a_damaged_tokenizer_is_an_error_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load_codec(tmp_path)
    assert "\n" not in str(caught.value)


def test_tools_that_the_template_shows_after_a_turn_are_shown_there(codec: TextCodec) -> None:
    show = "{% if loop.last and tools %}{{ tools[0].function.name }} {% endif %}"
    text = "{% for m in messages %}" + show + "{{ m.content }}<|im_end|>{% endfor %}"
    template = ChatTemplate(codec, template=text, tool_schemas=[SCHEMA])
    assert template.decode(template.environment_ids([{"role": "user", "content": "1"}])) == "look 1<|im_end|>"


def test_template_variables_reach_the_template(codec: TextCodec) -> None:
    text = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{{ mood }}"
    template = ChatTemplate(codec, template=text, kwargs={"mood": "glad"})
    assert template.decode(template.environment_ids([{"role": "user", "content": "1"}])) == "1<|im_end|>glad"


def _control_in(codec: TextCodec, ids: Sequence[int]) -> list[int]:
    return [token for token in ids if token in codec.control_ids]
