"""I8: token in, token out. What a session wrote is what the engine said in its turns, id for id, with the versions that said it;
its reward is that of its text. A session that goes on after a restart goes on from the turns that were kept, and no others.
"""

import array
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.journal.entries import PutTurn
from asyncrl.ports import GenerateRequest, Generation
from asyncrl.simulation.edges.reward import reward_of
from asyncrl.simulation.faults.plan import EVALUATION
from asyncrl.simulation.oracles.ground import Ground
from asyncrl.simulation.oracles.memory import Call, Position
from asyncrl.simulation.oracles.oracle import Oracle
from asyncrl.simulation.oracles.shadow import Changes, ShadowRow


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
        self._calls = ground.memory.calls
        """uid -> (session, attempt) -> its calls so far."""
        self._num_trained = ground.run.rollout.n

    def begin(self) -> None:
        """What was said in a turn that was not kept was not said."""
        for uid, sessions in self._calls.items():
            for (session_id, attempt), calls in list(sessions.items()):
                kept = self.ground.shadow.turns.get(uid, {}).get(session_id, 0)
                calls[:] = [call for call in calls if call.turn < kept and attempt == self._attempt_of(uid, session_id)]

    def _attempt_of(self, uid: str, session_id: int) -> int:
        """-1: of a session that no lease speaks of, a greedy one beside the others."""
        lease = self.ground.shadow.leases.get(uid, {}).get(session_id)
        return -1 if lease is None else lease.attempt

    def _calls_of(self, uid: str, session_id: int) -> list[Call]:
        """Of the attempt under way."""
        return self._calls.setdefault(uid, {}).setdefault((session_id, self._attempt_of(uid, session_id)), [])

    # --- what the engine said

    def generated(self, request: GenerateRequest, generation: Generation) -> None:
        if request.request_id.startswith(EVALUATION):
            return
        uid, session, turn, *position = request.request_id.split("_")
        call = Call(int(turn), int(position[0]) if position else 0, list(request.prompt_ids), generation)
        calls = self._calls_of(uid, int(session))
        if calls and int(session) >= self._num_trained and (call.turn, call.position) == (0, 0):
            calls.clear()  # another attempt of a greedy session
        self._check_order(request.request_id, calls[-1] if calls else None, call)
        self._check_context(request.request_id, calls[-1] if calls else None, call)
        self._check_versions(request.request_id, calls[-1] if calls else None, generation)
        self._check_seed(uid, (int(session), call.turn, call.position), request)
        calls.append(call)

    def _check_order(self, request_id: str, before: Call | None, call: Call) -> None:
        """Each turn once an attempt, from the first that is not kept."""
        next_turn = 0 if before is None else before.turn + 1
        goes_on = before is not None and call.turn == before.turn and call.position > before.position
        if not goes_on and (call.turn, call.position) != (next_turn, 0):
            self.fail(f"request {request_id} was made, and the next turn of the attempt is {next_turn}")

    def _check_seed(self, uid: str, which: Position, request: GenerateRequest) -> None:
        """A repeated call is the same call, in every attempt and life."""
        first = self.ground.memory.seeds.setdefault(uid, {}).setdefault(which, request.seed)
        if first != request.seed:
            self.fail(f"request {request.request_id} was made with seed {request.seed}; an attempt before had {first}")

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

    def _check_versions(self, request_id: str, before: Call | None, generation: Generation) -> None:
        """They are of weights that there are, and do not fall within a session."""
        spans = () if before is None else before.answer.version_spans
        last = max((span.version for span in spans), default=0)
        for span in generation.version_spans:
            if not last <= span.version <= self.ground.engines.newest:
                newest = self.ground.engines.newest
                self.fail(f"request {request_id} was sampled by version {span.version}, after {last}; there are up to {newest}")
            last = span.version

    # --- what the session wrote

    def entry(self, changes: Changes) -> None:
        for put in changes.put:
            row = put.row
            if row.entry.session_id is not None and put.tag_before is None:
                self._check_row(row)
        for turn in changes.turns:
            self._check_turn(turn.put)
        for uid in changes.ended:
            self.ground.memory.end_group(changes.number, uid)

    def _check_turn(self, put: PutTurn) -> None:
        """A turn is kept as what its calls said, before anything follows it."""
        calls = self._calls_of(put.uid, put.session_id)
        of_turn = [call.answer for call in calls if call.turn == put.turn]
        said = array.array("q", [id_ for answer in of_turn for id_ in answer.token_ids]).tobytes()
        versions = array.array("i", [version for answer in of_turn for version in answer.token_versions()]).tobytes()
        kept = {name: bytes(data) for name, (_, data) in put.columns.items()}
        who = f"turn {put.turn} of session {put.uid}_{put.session_id}"
        if not calls or calls[-1].turn != put.turn or not kept.get("responses", b"").startswith(said):
            newest = f"turn {calls[-1].turn}" if calls else "none"
            self.fail(f"{who} was kept with other ids than it said; its newest is {newest}")
        if not kept.get("token_versions", b"").startswith(versions):
            self.fail(f"{who} was kept with other versions than those that sampled it")

    def _check_row(self, row: ShadowRow) -> None:
        key, uid, session_id = row.entry.key, row.entry.uid, row.entry.session_id
        calls = self._calls.get(uid, {}).get((session_id or 0, row.entry.attempt), [])
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
