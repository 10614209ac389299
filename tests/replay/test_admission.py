"""The admission rule, its counters, and what it refuses."""

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.errors import AdmissionError
from asyncrl.replay import Admission, Found


def filled(count: int = 2, *, batch_size: int = 2, max_staleness: int = 0) -> Admission:
    admission = Admission(batch_size=batch_size, max_staleness=max_staleness)
    for number in range(count):
        admission.admit(f"u{number}")
    return admission


def test_sync_admits_one_batch_and_the_next_only_after_publication() -> None:
    admission = filled(2)
    assert not admission.has_place
    admission.record(1, ["u0", "u1"])
    assert not admission.has_place, "a sample frees no place"
    admission.publish(1)
    assert admission.has_place


def test_a_drop_frees_a_place() -> None:
    admission = filled(2)
    admission.drop("u0", "failure")
    assert admission.has_place
    admission.admit("u2")
    assert admission.alive == ("u1", "u2")


def test_the_bound_counts_versions_of_several_steps() -> None:
    admission = Admission(batch_size=1, updates=2, max_staleness=1)
    for number in range(4):
        admission.admit(f"u{number}")
    assert not admission.has_place
    admission.record(1, ["u0"])
    admission.record(2, ["u1"])
    admission.publish(1)
    admission.admit("u4")
    admission.admit("u5")
    assert not admission.has_place


def test_the_first_alive_are_a_part_of_them_in_order() -> None:
    admission = filled(4, batch_size=4)
    admission.drop("u1", "failure")
    assert admission.first_alive(2) == ("u0", "u2")
    assert admission.first_alive(9) == admission.alive == ("u0", "u2", "u3")


def test_a_recorded_group_is_open_until_its_step_is_published() -> None:
    admission = filled(2, max_staleness=1)
    admission.record(1, ["u0", "u1"])
    assert admission.num_recorded == 2
    with pytest.raises(AdmissionError, match="'u1' is already admitted"):
        admission.admit("u1")
    admission.publish(1)
    assert admission.num_recorded == 0
    admission.admit("u1")


def test_admitting_without_a_place_says_how_many_there_are() -> None:
    with pytest.raises(AdmissionError, match=r"no place for group 'u2': 2 alive and 0 recorded since version 0, 2 allowed"):
        filled(2).admit("u2")


def test_nothing_is_admitted_twice_dropped_twice_or_recorded_unknown() -> None:
    admission = filled(2, batch_size=4)
    with pytest.raises(AdmissionError, match="'u0' is already admitted"):
        admission.admit("u0")
    with pytest.raises(AdmissionError, match="'u9' cannot be dropped"):
        admission.drop("u9", "failure")
    for uids in (["u0", "u9"], ["u0", "u0"]):
        with pytest.raises(AdmissionError, match="step 1 cannot be recorded"):
            admission.record(1, uids)
    admission.record(1, ["u0"])
    with pytest.raises(AdmissionError, match="'u0' is already admitted"):
        admission.admit("u0")
    with pytest.raises(AdmissionError, match="'u0' cannot be dropped"):
        admission.drop("u0", "failure")
    assert admission.counters() == {"admitted": 2, "trained": 0, "open": 2, "dropped": 0}


@pytest.mark.parametrize("step", [0, 2])
def test_steps_are_recorded_in_order(step: int) -> None:
    with pytest.raises(AdmissionError, match=f"step {step} cannot be recorded after step 0"):
        filled(2).record(step, ["u0"])


def test_a_version_needs_its_steps_and_does_not_fall() -> None:
    admission = filled(2)
    with pytest.raises(AdmissionError, match="version 1 cannot be published"):
        admission.publish(1)
    admission.record(1, ["u0", "u1"])
    admission.publish(1)
    admission.publish(1)
    with pytest.raises(AdmissionError, match="version 0 cannot be published"):
        admission.publish(0)
    assert admission.counters()["trained"] == 2


def test_a_resumed_run_goes_on_after_its_version() -> None:
    admission = Admission(batch_size=1, updates=2, version=3)
    admission.admit("a")
    admission.record(7, ["a"])
    assert (admission.version, admission.last_step) == (3, 7)


def test_conservation_is_seen_to_break() -> None:
    admission = filled(2)
    admission.check_conservation()
    del admission._alive["u0"]  # a bug: a group forgotten without a count
    with pytest.raises(AdmissionError, match=r"admitted 2 != trained 0 \+ dropped 0 \+ open 1"):
        admission.check_conservation()


async def test_waiting_for_a_place_is_woken_by_a_drop_and_by_a_publication() -> None:
    admission = filled(2)

    def publish() -> None:
        admission.record(1, ["u0", "u2"])
        admission.publish(1)

    def drop() -> None:
        admission.drop("u1", "failure")

    for free in (drop, publish):
        waiting = [asyncio.create_task(admission.wait_for_place()) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        free()
        await asyncio.wait_for(asyncio.gather(*waiting), 10)
        await asyncio.wait_for(admission.wait_for_place(), 10)
        admission.admit("u2" if admission.num_alive else "u3")


async def test_a_sample_wakes_no_waiting_feed() -> None:
    admission = filled(2)
    waiting = asyncio.create_task(admission.wait_for_place())
    await asyncio.sleep(0)
    admission.record(1, ["u0", "u1"])
    await asyncio.sleep(0)
    assert not waiting.done()
    admission.publish(1)
    await asyncio.wait_for(waiting, 10)


class AdmissionModel(RuleBasedStateMachine):
    """Any order of admissions, drops, records and publications keeps the bound, the order and the counts."""

    @initialize(batch=st.integers(1, 3), updates=st.integers(1, 2), staleness=st.integers(0, 2))
    def begin(self, batch: int, updates: int, staleness: int) -> None:
        self.batch, self.updates, self.staleness = batch, updates, staleness
        self.admission = Admission(batch_size=batch, updates=updates, max_staleness=staleness)
        self.next_uid = 0
        self.alive: list[str] = []
        self.born: dict[str, int] = {}
        self.version = self.step = self.dropped = 0

    @rule()
    def admit(self) -> None:
        uid = f"u{self.next_uid}"
        recorded = (self.step - self.version * self.updates) * self.batch
        if len(self.alive) + recorded + 1 > (self.staleness + 1) * self.batch * self.updates:
            assert not self.admission.has_place
            with pytest.raises(AdmissionError):
                self.admission.admit(uid)
            return
        self.admission.admit(uid)
        self.next_uid += 1
        self.alive.append(uid)
        self.born[uid] = self.version

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(self.alive))
        self.admission.drop(uid, "failure")
        self.alive.remove(uid)
        self.dropped += 1

    @precondition(lambda self: len(self.alive) >= self.batch)
    @rule()
    def record(self) -> None:
        """The staleness bound as a theorem: whatever happened, the head of the queue is young enough for the weights it trains."""
        head = self.alive[: self.batch]
        weights = self.step // self.updates
        assert all(0 <= weights - self.born[uid] <= self.staleness for uid in head)
        self.step += 1
        self.admission.record(self.step, head)
        del self.alive[: self.batch]

    @precondition(lambda self: self.step >= (self.version + 1) * self.updates)
    @rule()
    def publish(self) -> None:
        self.version += 1
        self.admission.publish(self.version)

    @invariant()
    def agrees(self) -> None:
        self.admission.check_conservation()
        assert self.admission.alive == tuple(self.alive)
        trained = self.version * self.updates * self.batch
        assert self.admission.counters() == {
            "admitted": self.next_uid,
            "trained": trained,
            "open": self.next_uid - trained - self.dropped,
            "dropped": self.dropped,
            **({"dropped/failure": self.dropped} if self.dropped else {}),
        }


AdmissionModel.TestCase.settings = settings(max_examples=100, stateful_step_count=60)
TestAdmissionModel = AdmissionModel.TestCase


def test_no_more_groups_are_admitted_than_the_steps_that_are_left_take() -> None:
    admission = Admission(batch_size=2, max_staleness=3, total_steps=2)
    for uid in "abcd":
        admission.admit(uid)
    assert not admission.has_place
    admission.record(1, ["a", "b"])
    assert not admission.has_place, "the second step has its groups"
    admission.drop("c", "failure")
    assert admission.has_place, "it lacks one"


def test_what_a_restart_found_is_counted_on() -> None:
    found = Found(alive=("e", "f"), records={2: ("c", "d")}, num_admitted=7, num_trained=2, num_dropped={"failure": 1})
    admission = Admission(batch_size=2, max_staleness=1, version=1, found=found)
    admission.check_conservation()
    assert admission.counters() == {"admitted": 7, "trained": 2, "open": 4, "dropped": 1, "dropped/failure": 1}
    assert (admission.last_step, admission.restored) == (2, 2)
    assert not admission.has_place
    with pytest.raises(AdmissionError, match="step 2 failed and was not trained"):
        admission.publish(2)
    assert admission.take_again(2) == ("c", "d")
    admission.publish(2)
    assert admission.summary() == "groups: admitted 7 = trained 4 + dropped 1 (failure 1) + open 2"
