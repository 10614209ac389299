"""I8: token in, token out. What a session wrote is what the engine said in its turns, id for id; its reward is that of its text."""

import array
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.journal.entries import PutTurn
from asyncrl.ports import GenerateRequest, Generation
from asyncrl.simulation.edges.reward import reward_of
from asyncrl.simulation.oracles.ground import Ground
from asyncrl.simulation.oracles.oracle import Oracle
from asyncrl.simulation.oracles.shadow import Changes, ShadowRow


@dataclass(frozen=True, slots=True)
class Call:
    """One generate call of a session: which turn, where in the turn it began, what it was asked with, what came back."""

    turn: int
    position: int
    prompt_ids: list[int]
    answer: Generation


@dataclass(frozen=True, slots=True)
class Expected:
    """The columns that a trajectory must have, as bytes; and numbers of its tag."""

    columns: dict[str, bytes]
    tag: dict[str, int]


class TokenInTokenOut(Oracle):
    """Columns of a trajectory, its tag and its reward, made again from the engine's answers alone."""

    name = "I8"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._calls: dict[str, dict[int, list[Call]]] = {}
        """uid -> session -> its calls so far."""

    # --- what the engine said

    def generated(self, request: GenerateRequest, generation: Generation) -> None:
        uid, session, turn, *position = request.request_id.split("_")
        call = Call(int(turn), int(position[0]) if position else 0, list(request.prompt_ids), generation)
        calls = self._calls.setdefault(uid, {}).setdefault(int(session), [])
        if calls and (call.turn, call.position) <= (calls[-1].turn, calls[-1].position):
            calls.clear()  # another attempt of the session
        self._check_context(request.request_id, calls[-1] if calls else None, call)
        self._check_versions(request.request_id, generation)
        calls.append(call)

    def _check_context(self, request_id: str, before: Call | None, call: Call) -> None:
        if before is None:
            prompt = self.ground.shadow.prompt(request_id.partition("_")[0])
            said = [] if prompt is None else self._prompt_ids(prompt)
            if call.prompt_ids != said:
                self.fail(f"request {request_id} asks with {_ends(call.prompt_ids)}; its prompt is {_ends(said)}")
            return
        said = [*before.prompt_ids, *before.answer.token_ids]
        if call.prompt_ids[: len(said)] != said:
            self.fail(f"request {request_id} asks with {_ends(call.prompt_ids)}, which does not go on from {_ends(said)}")

    def _prompt_ids(self, prompt: ShadowRow) -> list[int]:
        """Of the messages that the prompt's row holds."""
        cell = prompt.cells.get("raw_prompt")
        return [] if cell is None else self.ground.edges.rollout.template.prompt_ids(msgspec.msgpack.decode(cell[1]))

    def _check_versions(self, request_id: str, generation: Generation) -> None:
        for span in generation.version_spans:
            if not 0 <= span.version <= self.ground.engines.version:
                self.fail(
                    f"request {request_id} was sampled by version {span.version}; there are up to {self.ground.engines.version}"
                )

    # --- what the session wrote

    def entry(self, changes: Changes) -> None:
        for put in changes.put:
            row = put.row
            if row.entry.session_id is not None and put.tag_before is None:
                self._check_row(row)
        for turn in changes.turns:
            self._check_turn(turn.put)
        for uid in changes.ended:
            self._calls.pop(uid, None)

    def _check_turn(self, put: PutTurn) -> None:
        """A turn is kept as what its calls said, before anything follows it."""
        calls = self._calls.get(put.uid, {}).get(put.session_id, [])
        said = [id_ for call in calls if call.turn == put.turn for id_ in call.answer.token_ids]
        kept = bytes(put.columns["responses"][1]) if "responses" in put.columns else b""
        if not calls or calls[-1].turn != put.turn or not kept.startswith(array.array("q", said).tobytes()):
            newest = f"turn {calls[-1].turn}" if calls else "none"
            who = f"turn {put.turn} of session {put.uid}_{put.session_id}"
            self.fail(f"{who} was kept with other ids than it said; its newest is {newest}")

    def _check_row(self, row: ShadowRow) -> None:
        key, uid, session_id = row.entry.key, row.entry.uid, row.entry.session_id
        calls = self._calls.get(uid, {}).get(session_id or 0, [])
        if not calls:
            self.fail(f"key {key!r} was written, but no engine answered its session")
        expected = expected_of(calls)
        for name, data in expected.columns.items():
            cell = row.cells.get(name)
            if cell is None:
                self.fail(f"key {key!r} has no field {name!r}")
            elif cell[1] != data:
                self.fail(f"field {name!r} of key {key!r}: {_difference(name, bytes(cell[1]), data)}")
        for name, number in expected.tag.items():
            if row.entry.tag.get(name) != number:
                self.fail(f"tag {name!r} of key {key!r} is {row.entry.tag.get(name)}; the engine's answers say {number}")
        self._check_reward(row, calls)

    def _check_reward(self, row: ShadowRow, calls: list[Call]) -> None:
        last = [id_ for call in calls if call.turn == calls[-1].turn for id_ in call.answer.token_ids]
        score = reward_of(self.ground.edges.rollout.template.decode(last, skip_special=True))
        cell = row.cells.get("reward_score")
        found = None if cell is None else _numbers("f", bytes(cell[1]))[0]
        if found != score:
            self.fail(f"field 'reward_score' of key {row.entry.key!r} is {found}; the reward of its text is {score}")


def expected_of(calls: list[Call]) -> Expected:
    """A trajectory is the last request and its answer; sampled ids stand where their calls began."""
    last = calls[-1]
    ids, num_prompt = [*last.prompt_ids, *last.answer.token_ids], len(calls[0].prompt_ids)
    size = len(ids) - num_prompt
    mask, log_probs, versions = bytearray(size), [0.0] * size, [-1] * size
    for call in calls:
        start, count = len(call.prompt_ids) - num_prompt, len(call.answer.token_ids)
        mask[start : start + count] = b"\1" * count
        log_probs[start : start + count] = call.answer.log_probs
        versions[start : start + count] = call.answer.token_versions()
    spans = [span.version for call in calls for span in call.answer.version_spans]
    packed, response_mask = array.array("q", ids).tobytes(), bytes(mask)
    return Expected(
        columns={
            "input_ids": packed,
            "prompts": packed[: num_prompt * 8],
            "responses": packed[num_prompt * 8 :],
            "response_mask": response_mask,
            "loss_mask": response_mask,
            "rollout_log_probs": array.array("f", log_probs).tobytes(),
            "token_versions": array.array("i", versions).tobytes(),
        },
        tag={
            "prompt_len": num_prompt,
            "response_len": size,
            "seq_len": len(ids),
            "policy_len": sum(mask),
            "min_global_steps": min(spans, default=0),
            "max_global_steps": max(spans, default=0),
        },
    )


# --- words ------------------------------------------------------------------------------------------------------------------------

_CODES = {"response_mask": "b", "loss_mask": "b", "rollout_log_probs": "f", "token_versions": "i"}


def _numbers(code: str, data: bytes) -> "array.array[Any]":
    numbers = array.array(code)
    numbers.frombytes(data)
    return numbers


def _difference(name: str, found: bytes, expected: bytes) -> str:
    here, there = (_numbers(_CODES.get(name, "q"), data) for data in (found, expected))
    if len(here) != len(there):
        return f"{len(here)} entries, where the engine's answers make {len(there)}"
    at = next(position for position, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1])
    return f"{here[at]} at position {at}, where the engine's answers say {there[at]}"


def _ends(ids: list[int]) -> str:
    return f"{len(ids)} ids ending in {ids[-3:]}"
