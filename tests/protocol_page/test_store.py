"""The lives from which the diagram, the verbs and the endings are drawn: whole enough to draw from, and true to the store."""

import re

import pytest

from asyncrl.protocol_page import lives, store
from asyncrl.protocol_page.callers import callers
from asyncrl.protocol_page.lives import Call, all_calls


def of(verb: str) -> list[Call]:
    return [call for call in all_calls() if call.verb == verb]


def test_the_diagram_shows_the_whole_life() -> None:
    drawn = dict(re.findall(r"(\S+ --> \S+) : (.+)", store.life_diagram()))
    assert {edge: set(labels.split(", ")) for edge, labels in drawn.items()} == {
        "[*] --> under_way": {"admit"},
        "under_way --> under_way": {"put_turn", "settle_session", "reopen_group"},
        "under_way --> settled": {"settle_session", "settle_group", "close_lease"},
        "settled --> recorded": {"record"},
        "recorded --> recorded": {"stages", "revive"},
        "recorded --> retired": {"retire"},
        "retired --> [*]": {"purge"},
        "retired --> recorded": {"restart"},
        "under_way --> [*]": {"drop", "kv_clear"},
        "settled --> [*]": {"drop", "kv_clear"},
    }


def test_no_state_of_the_diagram_is_a_word_of_its_own() -> None:
    states = {word for line in re.findall(r"(\S+) --> (\S+)", store.life_diagram()) for word in line}
    assert states == set(lives.STATES)


def test_a_verb_that_no_life_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "LIVES", lives.LIVES[1:])
    all_calls.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"no life .* calls \['purge', .*'revive'\]"):
            all_calls()
    finally:
        all_calls.cache_clear()


def test_admitted_is_dropped_and_purged_and_open_at_any_time() -> None:
    for call in all_calls():
        counters, is_open = call.after.counters, call.after.state != "[*]"
        dropped = sum(count for name, count in counters.items() if name.startswith("dropped/"))
        assert counters["admitted"] == dropped + counters.get("purged_groups", 0) + is_open, call


def test_what_goes_for_good_leaves_nothing() -> None:
    for call in [*of("drop"), *of("kv_clear"), *of("purge")]:
        after = call.after
        assert (after.num_visible, after.num_kept, after.num_leases, after.num_turns) == (0, 0, 0, 0), call


def test_retired_rows_are_hidden_and_kept_and_revived_ones_neither() -> None:
    (retired, *_), (revived,) = of("retire"), of("revive")
    assert (retired.before.num_visible, retired.after.num_visible, retired.after.num_kept) == (3, 0, 3)
    assert (revived.after.num_visible, revived.before.stage_fields, revived.after.stage_fields) == (3, 2, 0)
    assert revived.after.state == "recorded"


def test_a_restart_with_older_weights_gives_the_rows_back_and_keeps_what_was_under_way() -> None:
    found = {(call.before.state, call.step): call for call in of("restart")}
    assert {key: call.after.state for key, call in found.items()} == {
        ("under_way", 0): "under_way",
        ("settled", 0): "settled",
        ("recorded", 0): "recorded",
        ("retired", 0): "recorded",
        ("retired", 1): "retired",
    }
    assert all(call.before.num_kept == call.after.num_kept for call in found.values())
    assert (found["under_way", 0].after.num_turns, found["recorded", 0].after.stage_fields) == (1, 0)
    assert (found["retired", 0].after.num_visible, found["retired", 1].after.num_visible) == (3, 0)


def test_the_callers_are_found() -> None:
    found = callers()
    assert found["admit"] == ["agents/runner.py"]
    assert found["record"] == ["replay/buffer.py"]
    assert found["retire"] == ["asyncrl/trainer.py"]
    assert [path for files in found.values() for path in files if "transfer_queue" in path or "protocol_page" in path] == []
