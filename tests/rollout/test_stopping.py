"""Stop strings against a plain search in the whole text, for tokens that end inside characters and tokenizers that drop a space."""

import random

import pytest

from asyncrl.ports import Decode, SamplingParams, StopReason
from asyncrl.rollout.stopping import StopRules

PIECES = [
    *(bytes([value]) for value in "\u20ac\u00e9".encode()),
    b" ",
    b"a",
    b" a",
    b"b",
    b" ab",
    b"</",
    b" </",
    b"tool",
    b">",
    b"\n",
    b"b a",
]
STRINGS = ["</tool>", "\u20ac", "a b", " a", "a ", " ", "\n\n", "\u00e9 ", " </"]


def spell(ids: list[int]) -> str:
    return b"".join(PIECES[token] for token in ids).decode(errors="replace")


def spell_and_strip(ids: list[int]) -> str:
    """As tokenizers of the SentencePiece family decode: the space that marks the first word's beginning is left out."""
    return spell(ids).removeprefix(" ")


@pytest.mark.parametrize("decode", [spell, spell_and_strip])
def test_an_answer_stops_with_the_token_that_completes_a_stop_string(decode: Decode) -> None:
    draw = random.Random(1)
    for _ in range(300):
        strings = tuple(draw.sample(STRINGS, draw.randint(1, 2)))
        prompt, answer = [5], [draw.randrange(len(PIECES)) for _ in range(30)]
        rule = StopRules(100, decode).rule(SamplingParams(stop_strings=strings, max_tokens=31), len(prompt))
        ends = [end for end in range(1, 31) if rule.reason([*prompt, *answer[:end]]) is StopReason.STOP]
        expected = [end for end in range(1, 31) if any(string in spell(answer[:end]) for string in strings)]
        assert ends[:1] == expected[:1], (strings, [PIECES[token] for token in answer])
