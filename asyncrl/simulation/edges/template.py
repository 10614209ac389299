"""A model's text without a model: a vocabulary in which one id is a word, a tag or a piece of a tool call.

ids      0 end of a turn   1 generation prompt   2 a tool's answer   3 <tool_response>   4 </tool_call>   5 end of a call's JSON
         16 + k call of tool k     1000 + n the digits of n     4096 + n words
"""

import json
from collections.abc import Sequence

from asyncrl.ports import Messages

END, GENERATE, ANSWER, RESPONSE_TAG, CLOSE_TAG, CLOSE_JSON, CALL, DIGITS, WORDS = 0, 1, 2, 3, 4, 5, 16, 1000, 4096
NUM_DIGITS, NUM_WORDS = 1000, 1 << 18
VOCABULARY = WORDS + 2 * NUM_WORDS
"""Ids are below it: a turn has at most `NUM_WORDS` words, from any of as many."""


class SimTemplate:
    """`tools`: names, in the order of their calls' ids."""

    end_token_id = END
    stop_token_ids: tuple[int, ...] = (END,)

    def __init__(self, tools: Sequence[str]) -> None:
        self._pieces = {
            END: "<end>",
            GENERATE: "<go>",
            ANSWER: "<answer>",
            RESPONSE_TAG: "<tool_response>",
            CLOSE_TAG: "</tool_call>",
        }
        self._pieces[CLOSE_JSON] = '"}}'
        self._control = {text: number for number, text in self._pieces.items() if number < CLOSE_JSON}
        for number, name in enumerate(tools):
            self._pieces[CALL + number] = f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {{"query": "'

    def prepare(self) -> None:
        """Nothing is loaded."""

    def token_id(self, text: str) -> int | None:
        return self._control.get(text)

    def prompt_ids(self, messages: Messages) -> list[int]:
        """The content of a message is the number of its ids, and a number that makes its words its own."""
        length, _, number = str(messages[-1]["content"]).partition(" ")
        first = WORDS + (int(number or 0) * 97) % NUM_WORDS
        return [*range(first, first + int(length) - 1), GENERATE]

    def environment_ids(self, messages: Messages) -> list[int]:
        """Of a tool's answer, the same; another text is as many ids as it has words."""
        ids: list[int] = []
        for message in messages:
            length = str(message["content"]).partition(" ")[0]
            ids += [ANSWER] * max(1, int(length) if length.isdigit() else 4)
        return [*ids, GENERATE]

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        least = CLOSE_TAG if skip_special else 0
        return "".join([f"w{n - WORDS} " if n >= WORDS else self._piece(n) for n in ids if n >= least])

    def decode_turn(self, ids: Sequence[int]) -> str:
        return self.decode(ids)

    def _piece(self, number: int) -> str:
        piece = self._pieces.get(number)
        return piece if piece is not None else f"{number - DIGITS:03d}"


def call_ids(tool: int, draw: float) -> list[int]:
    """A call of tool number `tool`: the tool, `draw` in [0, 1) as six digits, and two ends."""
    high, low = divmod(int(draw * 1_000_000), NUM_DIGITS)
    return [CALL + tool, DIGITS + high, DIGITS + low, CLOSE_JSON, CLOSE_TAG]
