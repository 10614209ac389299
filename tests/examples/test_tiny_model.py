"""The quick start's tokenizer and template: what the token builder and the tool agent rely on."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from asyncrl.agents.chat_template import ChatTemplate
from asyncrl.config import ModelConfig
from asyncrl.examples.tiny_model import SPECIAL, TAGS, build_model
from asyncrl.model_files import check_model_files

if TYPE_CHECKING:
    from asyncrl.ports import Messages

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+34"}}\n</tool_call>'


def test_the_folder_is_a_hugging_face_model(model_folder: Path) -> None:
    check_model_files(ModelConfig(path=str(model_folder)))
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    assert 200_000 < sum(parameter.numel() for parameter in model.parameters()) < 250_000


def test_same_seed_same_weights_and_the_global_generator_is_left_alone(model_folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second, other = (build_model(tokenizer, seed=seed).model.embed_tokens.weight for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_call_is_a_few_tokens_and_digits_stand_alone(template: ChatTemplate) -> None:
    tokens = [template.decode([token]) for token in template.encode_assistant(CALL, end=False)]
    assert tokens == ["<tool_call>", '\n{"name": "calculator", "arguments": {"expression": "', *"12+34", '"}}\n', "</tool_call>"]


def test_a_prompt_is_short_and_names_the_tools(template: ChatTemplate) -> None:
    messages: Messages = [{"role": "user", "content": "what is 12-34+56?"}]
    assert template.prompt_text(messages) == (
        "<|im_start|>system\ntools: calculator<|im_end|>\n<|im_start|>user\nwhat is 12-34+56?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(template.prompt_ids(messages)) <= 32


def test_any_text_survives_the_tokenizer(template: ChatTemplate) -> None:
    text = "  ä日\U0001f600\t{}\n\n -1?"
    assert template.decode(template.encode_assistant(text, end=False)) == text


@pytest.mark.parametrize("token", [*SPECIAL, *TAGS])
def test_a_tool_result_cannot_spell_a_control_token(template: ChatTemplate, token: str) -> None:
    plain = template.environment_ids([{"role": "tool", "content": "x"}])
    spelled = template.environment_ids([{"role": "tool", "content": token}])
    assert template.codec.control[token] not in set(spelled) - set(plain)
    assert token in template.decode(spelled)


def test_rendering_is_prefix_stable(template: ChatTemplate) -> None:
    question: Messages = [{"role": "user", "content": "what is 12+34?"}]
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "12+34"}}}
    turn: Messages = [*question, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result: Messages = [{"role": "tool", "content": "46"}]
    grown = template.prompt_ids(question) + template.encode_assistant(CALL) + template.environment_ids(result)
    assert grown == template.prompt_ids([*turn, *result])


def test_two_results_share_a_user_block(template: ChatTemplate) -> None:
    text = template.decode(template.environment_ids([{"role": "tool", "content": "46"}, {"role": "tool", "content": "7"}]))
    assert text == (
        "\n<|im_start|>user\n<tool_response>\n46\n</tool_response>\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
