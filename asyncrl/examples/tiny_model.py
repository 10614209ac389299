"""The quick start's policy: a Llama of 230 thousand random weights, and a tokenizer trained on the demonstrator's transcripts.

problems, demonstrator -> [tiny_model] -> a Hugging Face directory -> sft. Nothing is downloaded. The tokenizer is a byte-level BPE:
digits, signs and the question mark stand alone (so that operands are copied digit by digit and no merge crosses them), everything
between them merges, so the fixed JSON around a call's expression is two tokens.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from asyncrl.ports import Json, Messages

PAD, TURN_START, TURN_END = "<pad>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, TURN_START, TURN_END)
"""Control tokens that decoding leaves out."""
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Control tokens that stay in decoded text: the tool-call parser reads them."""

VOCABULARY_SIZE = 512
"""More than training finds merges for: the transcripts have about a dozen fixed pieces."""

CONTEXT_LEN = 512
"""Positions; the longest useful trajectory has about 80 tokens."""

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def train_tokenizer(conversations: Iterable[Messages], tools: list[Json]) -> PreTrainedTokenizerFast:
    """A tokenizer whose merges come from the conversations as the chat template renders them with `tools`."""
    template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    bytes_only = _wrap(_byte_level(), template)
    rendered = (str(bytes_only.apply_chat_template(messages, tools=tools, tokenize=False)) for messages in conversations)
    backend = _byte_level()
    trainer = BpeTrainer(vocab_size=VOCABULARY_SIZE, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(_pieces(rendered), trainer)
    return _wrap(backend, template)


def _byte_level() -> Tokenizer:
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = Sequence(_splits())
    backend.decoder = ByteLevelDecoder()
    return backend


def _splits() -> list[PreTokenizer]:
    return [Split(Regex(r"[0-9+\-?]"), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """Text between control tokens: a merge must not eat half of one."""
    control = re.compile("|".join(re.escape(token) for token in (*SPECIAL, *TAGS)))
    for text in texts:
        yield from filter(None, control.split(text))


def _wrap(backend: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    # Added after training: control tokens stay out of the model's own vocabulary, so plain text can never spell one.
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=TURN_END,
        chat_template=template,
        model_max_length=CONTEXT_LEN,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> LlamaForCausalLM:
    """A random policy. Same seed, same weights; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(  # type: ignore[no-untyped-call]
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=64,
                intermediate_size=192,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=4,
                head_dim=32,  # the smallest that vLLM's CPU build can serve
                max_position_embeddings=CONTEXT_LEN,
                tie_word_embeddings=True,
                pad_token_id=_token_id(tokenizer, PAD),
                bos_token_id=None,
                eos_token_id=_token_id(tokenizer, TURN_END),
            )
        )


def _token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    return int(tokenizer.get_vocab()[token])


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face model directory."""
    disable_progress_bar()  # type: ignore[no-untyped-call]  # one shard of a megabyte
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
