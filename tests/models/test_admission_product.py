"""The product's `Admission` is the model: the same after every move in every state; it refuses what the model has no move for."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from asyncrl.errors import AdmissionError
from asyncrl.replay import Admission
from tests.models.admission.model import RESTORED, Action, AdmissionModel, Case, State, Verb
from tests.models.admission.policies import RIGHT, until_publication
from tests.models.search import reached

CASES = [
    Case(max_staleness=0, batch=2),
    Case(max_staleness=0, batch=2, updates=2),
    Case(max_staleness=1, batch=1, updates=2, is_lagging=True),
    Case(max_staleness=1, batch=2, is_lagging=True),
    Case(max_staleness=2, batch=1, is_lagging=True),
]


class Seen(NamedTuple):
    """All that an `Admission` shows."""

    alive: tuple[str, ...]
    num_recorded: int
    version: int
    last_step: int
    restored: int | None
    has_place: bool
    counters: dict[str, int]


def seen(a: Admission) -> Seen:
    return Seen(a.alive, a.num_recorded, a.version, a.last_step, a.restored, a.has_place, a.counters())


def driven(case: Case, way: tuple[Action, ...], kind: type[Admission] = Admission) -> Admission:
    """A new one that was told of each action. The n-th group that is admitted has the uid n."""
    admission = kind(batch_size=case.batch, updates=case.updates, max_staleness=case.max_staleness)
    for action in way:
        act(admission, action)
    return admission


def act(admission: Admission, action: Action) -> None:
    """An update and a retirement are none of its business."""
    last = admission.last_step
    match action.verb:
        case Verb.ADMIT:
            admission.admit(str(admission.counters()["admitted"]))
        case Verb.DROP:
            admission.drop(admission.alive[action.at], "failure")
        case Verb.DROP_REST:
            for uid in admission.alive:
                admission.drop(uid, "feed_end")
        case Verb.RECORD:
            admission.record(last + 1, [admission.alive[i] for i in action.groups])
        case Verb.FAIL:
            admission.restore(last)
        case Verb.TAKE_AGAIN:
            assert admission.take_again(last) == admission.recorded(last)
        case Verb.PUBLISH:
            admission.publish(admission.version + action.at)


def check_agrees(admission: Admission, state: State, case: Case) -> None:
    shown, counters, num_recorded = seen(admission), admission.counters(), state.steps * case.batch
    admission.check_conservation()
    assert len(shown.alive) == len(state.alive)
    assert list(shown.alive) == sorted(shown.alive, key=int), "the queue is in the order of admission"
    assert shown.has_place == (until_publication(state, case) + 1 <= case.limit)
    assert shown.last_step - shown.version * case.updates == state.steps
    assert shown.num_recorded == num_recorded
    assert shown.restored == (shown.last_step if state.phase == RESTORED else None)
    assert counters["open"] == len(state.alive) + num_recorded
    assert counters["trained"] == shown.version * case.updates * case.batch


def drive_everywhere(case: Case, kind: type[Admission] = Admission) -> int:
    """Every move of every state that the model reaches; their number."""
    model, num_moves = AdmissionModel(case=case, policy=RIGHT), 0
    for state, way in reached(model):
        for action, _, after in model.moves(state):
            admission = driven(case, way, kind)
            check_agrees(admission, state, case)
            act(admission, action)
            check_agrees(admission, after, case)
            num_moves += 1
    return num_moves


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_product_moves_as_the_model_does(case: Case) -> None:
    assert drive_everywhere(case) > 50


class FreesAtRecord(Admission):
    @property
    def num_recorded(self) -> int:
        return 0


class OnePlaceMore(Admission):
    @property
    def has_place(self) -> bool:
        return self.num_alive + self.num_recorded <= self._limit


class PublishesEverything(Admission):
    def publish(self, version: int) -> None:
        super().publish(max(version, self.last_step))  # with one update a version


@pytest.mark.parametrize("kind", [FreesAtRecord, OnePlaceMore, PublishesEverything])
def test_another_product_would_be_noticed(kind: type[Admission]) -> None:
    with pytest.raises((AssertionError, AdmissionError)):
        drive_everywhere(Case(max_staleness=1, batch=2, is_lagging=True), kind)


def forbidden(admission: Admission, state: State, case: Case) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Calls that the model has no move for here."""
    last, head = admission.last_step, list(admission.alive[: case.batch])
    if not admission.has_place:
        yield "admit", ("stranger",)
    yield "drop", ("stranger", "failure")
    for uid in head:
        yield "admit", (uid,)
    for uid in admission.recorded(last) or ():
        yield "admit", (uid,)
        yield "drop", (uid, "failure")
        yield "record", (last + 1, [uid])
    yield "record", (last, head)
    yield "record", (last + 2, head)
    yield ("restore" if state.phase == RESTORED else "take_again"), (last,)
    trained = state.steps - (state.phase == RESTORED)
    yield "publish", (admission.version + trained // case.updates + 1,)
    yield "publish", (admission.version - 1,)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_product_refuses_what_the_model_has_no_move_for(case: Case) -> None:
    for state, way in reached(AdmissionModel(case=case, policy=RIGHT)):
        admission = driven(case, way)
        before = seen(admission)
        for name, arguments in forbidden(admission, state, case):
            with pytest.raises(AdmissionError):
                getattr(admission, name)(*arguments)
            assert seen(admission) == before, f"{name}{arguments} changed something after {[str(action) for action in way]}"
