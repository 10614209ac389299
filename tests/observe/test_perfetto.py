"""The Trace Event Format: what ui.perfetto.dev needs, spans that nest on every track, and a track a session."""

import itertools
import json
from collections.abc import Callable

import pytest

from asyncrl.observe.perfetto import trace_events
from asyncrl.observe.trace_file import Record
from asyncrl.ports import Json

Make = Callable[..., Record]


@pytest.fixture
def shown(make_record: Make) -> dict[str, Json]:
    record = make_record(3, "a", "b")
    found: dict[str, Json] = json.loads(json.dumps(trace_events(record, record.head.groups), allow_nan=False))
    return found


def check_schema(trace: dict[str, Json]) -> None:
    """Metadata and complete events only, with the keys and types of the format; each event's track has a name; spans nest."""
    named: set[tuple[int, int]] = set()
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in trace["traceEvents"]:
        place = (event["pid"], event["tid"])
        assert all(type(number) is int and number >= 0 for number in place)
        assert type(event["name"]) is str
        assert type(event["args"]) is dict
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert type(event["args"]["name"]) is str
            named.add(place)
        else:
            assert event["ph"] == "X"
            assert all(type(event[key]) is int for key in ("ts", "dur"))
            assert min(event["ts"], event["dur"]) >= 0
            assert type(event["cat"]) is str
            spans.setdefault(place, []).append((event["ts"], event["ts"] + event["dur"]))
    assert set(spans) <= named
    for track in spans.values():
        for first, second in itertools.combinations(sorted(track, key=lambda span: (span[0], -span[1])), 2):
            assert first[1] <= second[0] or second[1] <= first[1], "spans of a track overlap without nesting"


def test_it_is_a_trace_that_perfetto_opens(shown: dict[str, Json]) -> None:
    check_schema(shown)
    names = {event["args"]["name"] for event in shown["traceEvents"] if event["ph"] == "M"}
    assert {"trainer", "stages", "group a (trained in step 3)", "group b (trained in step 3)", "session 0"} <= names


def test_a_session_has_one_track_and_tools_at_the_same_time_their_own(shown: dict[str, Json]) -> None:
    of_group = [event for event in shown["traceEvents"] if event["pid"] == 2]
    tracks = {event["tid"]: event["args"]["name"] for event in of_group if event["name"] == "thread_name"}
    on = {event["name"]: tracks[event["tid"]] for event in of_group if event["ph"] == "X"}
    assert on == dict.fromkeys(("session 0", "turn 0", "slow", "reward"), "session 0") | {"fast": "session 0, also 2"}


def test_times_count_from_the_first_event_and_stages_tell_their_fields(shown: dict[str, Json]) -> None:
    events = {event["name"]: event for event in shown["traceEvents"] if event["ph"] == "X"}
    assert (events["session 0"]["ts"], events["session 0"]["dur"]) == (0, 2_000_000)
    assert shown["otherData"]["wall_time_at_0"] == 1e9 + 1.0
    assert events["update_actor"]["args"] == {"outcome": "ok", "write": ["responses"]}
    assert events["turn 0"]["args"]["tokens"] == 3


def test_a_record_without_spans_is_still_a_trace(make_record: Make) -> None:
    record = make_record(1, "a")
    bare = Record(head=record.head, lines=())
    check_schema(trace_events(bare, record.head.groups))
