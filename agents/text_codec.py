"""TextCodec: text <-> token ids of one tokenizer, with a plain side that cannot make control tokens.

Place: model folder -> [text_codec] -> chat_template. Owns the tokenizer and its plain twin; knows no template.

A *control token* is an added token that is special or is not in the model's own vocabulary (`<|im_end|>`, Qwen's `<tool_call>`).
Text that comes from the environment must never yield one. The way there has two halves:

1. `guard_message` breaks every spelling of a control token inside a message by one character that occurs in none of the texts.
2. `encode_rendered` splits the rendered text at the control tokens that are left (the template's own), takes the guards out and
   encodes the pieces between them with the plain twin, each as one string, so that template text and message text merge as usual.

Covered: whole spellings inside one string of a message. Not covered: a spelling that only arises where a template glues its own
text to a message's (`"<|" ~ content ~ "|>"`); no template known to us does that.
"""

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from asyncrl.errors import ModelError
from asyncrl.ports import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GUARDS = tuple(chr(0x10FFFD - step) for step in range(64))
"""Private-use characters at the end of Unicode; the first one that no text contains is the guard."""
_SHORT_PIECE_CHARS = 24
"""The template's own pieces are shorter; a longer piece is a message's, which comes once."""


class TextCodec:
    """One tokenizer. `spec_file` is its tokenizer.json, which says what is special more truly than the loaded tokenizer:
    transformers marks more tokens (Gemma's `<mask>`). Raises ModelError when the tokenizer has no fast (Rust) side."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", spec_file: Path | None = None) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ModelError(f"tokenizer {tokenizer.name_or_path!r} has no tokenizer.json; save it with save_pretrained first")
        self.tokenizer = tokenizer
        self._spec_file = spec_file
        self._backend = backend
        self._short_piece_ids = lru_cache(maxsize=4096)(lambda text: tuple(self.encode_plain(text)))

    @cached_property
    def _spec(self) -> dict[str, Json]:
        text = self._backend.to_str() if self._spec_file is None else self._spec_file.read_text(encoding="utf-8")
        spec: dict[str, Json] = json.loads(text)
        return spec

    @cached_property
    def control(self) -> dict[str, int]:
        """Text and id of each control token."""
        vocab = _names(self._spec["model"]["vocab"])
        added = self._spec["added_tokens"]
        return {token["content"]: token["id"] for token in added if token["special"] or token["content"] not in vocab}

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """The ids that plain text can never have."""
        return frozenset(self.control.values()) - self._unknown_ids

    @cached_property
    def _unknown_ids(self) -> frozenset[int]:
        # A model without byte fallback answers unknown characters with its unknown token, which is usually marked special.
        unknown = self._spec["model"].get("unk_token")
        number = None if unknown is None else self._backend.token_to_id(unknown)
        return frozenset() if number is None else frozenset([number])

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.control, key=len, reverse=True)
        # A pattern that matches nothing stands in where there is no control token.
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        added = [token for token in self._spec["added_tokens"] if token["content"] not in self.control]
        plain = {**self._spec, "added_tokens": added, "post_processor": None, "truncation": None, "padding": None}
        return tokenizers.Tokenizer.from_str(json.dumps({**plain, "model": _without(self._spec["model"], self.control)}))

    def prepare(self) -> None:
        """Build everything that is built once: 1 to 3 s for a vocabulary of 150,000. Call it off the loop."""
        _ = self._plain, self._pattern, self.control_ids

    def encode(self, text: str) -> list[int]:
        """Ids of the operator's or policy's own text: spelled control tokens become control tokens. No begin token."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text from outside, never a control token. Raises ModelError should the tokenizer make one all the same."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        if not self.control_ids.isdisjoint(ids):
            raise ModelError(f"tokenizer {self.tokenizer.name_or_path!r} makes a control token out of plain text {text[:80]!r}")
        return ids

    def guard_message(self, message: dict[str, Json], mark: str) -> dict[str, Json]:
        """`message` with every spelled control token broken by `mark` after its first character. The role stays: templates compare
        it, and it may be a control token in small vocabularies."""
        return {key: value if key == "role" else self._guard(value, mark) for key, value in message.items()}

    def _guard(self, value: Json, mark: str) -> Json:
        if isinstance(value, str):
            return self._pattern.sub(lambda found: _broken(found[0], mark), value)
        if isinstance(value, dict):
            return {self._guard(key, mark): self._guard(item, mark) for key, item in value.items()}
        return [self._guard(item, mark) for item in value] if isinstance(value, (list, tuple)) else value

    def encode_rendered(self, text: str, mark: str) -> list[int]:
        """Ids of rendered text: control tokens where the template wrote them, plain text (guards taken out) between them."""
        ids: list[int] = []
        position = 0
        for found in self.find_control(text, mark):
            ids.extend(self._piece(text[position : found.start()], mark))
            ids.append(self.control[found[0]])
            position = found.end()
        ids.extend(self._piece(text[position:], mark))
        return ids

    def find_control(self, text: str, mark: str) -> Iterable[re.Match[str]]:
        """Unguarded control tokens in `text`, left to right."""
        return (found for found in self._pattern.finditer(text) if not text.endswith(mark, 0, found.start()) or len(found[0]) > 1)

    def _piece(self, text: str, mark: str) -> Sequence[int]:
        text = text.replace(mark, "")
        # Most pieces are the template's own ("user\n"), so short ones are remembered.
        return self._short_piece_ids(text) if len(text) <= _SHORT_PIECE_CHARS else self.encode_plain(text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of ids; half a character becomes U+FFFD. `skip_special` leaves out tokens marked special, not `<tool_call>`."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token_id(self, text: str) -> int | None:
        """Id of `text` where it is one control token, else None."""
        return self.control.get(text)


def choose_guard(text: str) -> str:
    """A character that does not occur in `text`."""
    for mark in _GUARDS:
        if mark not in text:
            return mark
    raise ModelError("a message contains all the private-use characters that could guard its control-token text")


def _broken(token: str, mark: str) -> str:
    return mark + token if len(token) == 1 else token[0] + mark + token[1:]


def _names(vocab: Json) -> frozenset[str]:
    """Unigram models list [token, score] pairs, the others map tokens to ids."""
    return frozenset(vocab) if isinstance(vocab, dict) else frozenset(token for token, _ in vocab)


def _without(model: dict[str, Json], control: dict[str, int]) -> dict[str, Json]:
    """The model without control tokens in its vocabulary, where it looks whole words up there. Merges alone never reach them."""
    vocab = model["vocab"]
    looks_up_words = model.get("ignore_merges") or "merges" not in model
    if not isinstance(vocab, dict) or not looks_up_words:  # Unigram: a list whose places are the ids
        return model
    kept = {token: number for token, number in vocab.items() if token not in control or token == model.get("unk_token")}
    return {**model, "vocab": kept}
