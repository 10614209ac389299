"""Verdicts: what becomes of a group that is terminal. It is trained on, or dropped for a reason; or the run has had enough.

kv_watch -> ReplayBuffer -> [Verdicts] -> a batch, or a drop with its reason

Invariants:
1. A failure is never a reward: a failed group is dropped, or trained on without the sessions that failed.
2. Too many in a row end the run with the last reason; who only looks at numbers would see a run that lives.
"""

import logging
from collections.abc import Callable, Iterable

from asyncrl.config import ReplayConfig
from asyncrl.errors import GroupFailedError, ReplayError, TooManyFailuresError, TransitionError
from asyncrl.ports import GroupStatus, Incident, IncidentKind, Report
from asyncrl.replay.groups import PromptGroup

log = logging.getLogger(__name__)

LEAST_SESSIONS = 2
"""Of a failed group that is trained on in part: one session alone has nobody to be compared with."""


class Verdicts:
    """The policy of one run. filter_groups: dynamic sampling."""

    def __init__(self, config: ReplayConfig, *, group_size: int, filter_groups: bool, report: Report) -> None:
        self._config = config
        self._group_size = group_size
        self._filter_groups = filter_groups
        self._report = report
        self.num_failures = 0
        """Groups of which a session failed for good, so far."""
        self.num_partial = 0
        """Of these, those that are trained on without it."""
        self._failures_in_a_row = 0
        self._silent_in_a_row = 0
        self._last_failure = ""

    def of(self, group: PromptGroup) -> str | None:
        """Why a terminal group is dropped: `failure` or `no_signal`; None: it is trained on.

        Raises GroupFailedError where a failed group ends the run, TransitionError for a finished one without all its sessions.
        """
        if group.status is GroupStatus.FAILURE:
            if not self._is_kept_in_part(group):
                return "failure"
        else:
            self._check_complete(group)
            self._failures_in_a_row = 0
        return self._of_signal(group)

    def _is_kept_in_part(self, group: PromptGroup) -> bool:
        self.num_failures += 1
        policy = self._config.failed_groups
        if policy == "abort":
            raise GroupFailedError(
                f'group {group.uid} failed, and replay.failed_groups is "abort": {group.failure}; what is done is kept: '
                '--resume with replay.failed_groups = "refill" goes on without it'
            )
        if policy == "train_partial" and len(group.sessions) >= min(LEAST_SESSIONS, self._group_size):
            self.num_partial += 1
            self._failures_in_a_row = 0
            log.warning("group %s goes on with %d of its sessions: %s", group.uid, len(group.sessions), group.failure)
            return True
        self._failures_in_a_row += 1
        self._last_failure = f"{group.uid!r}: {group.failure}"
        return False

    def _check_complete(self, group: PromptGroup) -> None:
        if group.sessions != list(range(self._group_size)):
            raise TransitionError(
                f"group {group.uid!r} is finished but has rows of sessions {group.sessions}, not of all {self._group_size}"
            )

    def _of_signal(self, group: PromptGroup) -> str | None:
        """Dynamic sampling (DAPO, arXiv 2503.14476 eq. 11): a group whose rewards are all the same teaches nothing."""
        if not self._filter_groups:
            return None
        if group.has_signal:
            self._silent_in_a_row = 0
            return None
        self._silent_in_a_row += 1
        return "no_signal"

    # --- after drops

    def had_enough(self) -> ReplayError | None:
        """Are there too many in a row? For `sample` to raise; until it does, nothing more is admitted."""
        silent, failed = self._config.max_filtered_groups_in_a_row, self._config.max_failed_groups_in_a_row
        if self._silent_in_a_row >= silent:
            return TooManyFailuresError(
                f"{self._silent_in_a_row} groups in a row had the same reward in all sessions, and algorithm.filter_groups "
                f"dropped them (replay.max_filtered_groups_in_a_row = {silent}); change the task, or enlarge the group"
            )
        if self._failures_in_a_row >= failed:
            return TooManyFailuresError(
                f"{self._failures_in_a_row} groups failed in a row and none finished in between "
                f"(replay.max_failed_groups_in_a_row = {failed}); the last, {self._last_failure}"
            )
        return None

    def tell(self, failed: Iterable[PromptGroup], failures_of: Callable[[int], int]) -> None:
        """These were dropped; the rows of some are in quarantine from now on. failures_of: failed groups of a row so far."""
        for group in failed:
            log.warning("group %s failed and is replaced by a new one: %s", group.uid, group.failure)
            self._report(Incident(kind=IncidentKind.DROP, what="group", uid=group.uid, text=group.failure))
            number, limit = failures_of(group.row), self._config.quarantine_after
            if limit and number == limit:
                self._tell_quarantine(group, number)

    def _tell_quarantine(self, group: PromptGroup, number: int) -> None:
        told = f"row {group.row} of data.train_files failed {number} times and is left out from now on"
        text = f"{told}; the last: {group.failure}"
        log.warning("%s", text)
        self._report(Incident(kind=IncidentKind.QUARANTINE, what="row", uid=group.uid, text=text, limit="replay.quarantine_after"))
