"""The warning when nothing can be learned."""

from asyncrl.observe.no_signal import EXTREMES, NoSignalWatch

SILENT = dict.fromkeys(EXTREMES, 0.0)


def warned_steps(watch: NoSignalWatch, steps: list[dict[str, float]]) -> list[int]:
    return [step for step, numbers in enumerate(steps, start=1) if watch.see(step, numbers)]


def test_it_warns_once_when_the_patience_is_over() -> None:
    assert warned_steps(NoSignalWatch(patience=3), [SILENT] * 10) == [3]


def test_a_signal_starts_the_count_anew() -> None:
    for name in EXTREMES:
        signal = {**SILENT, name: -1e-9}
        assert warned_steps(NoSignalWatch(patience=2), [SILENT, signal, SILENT, SILENT, signal, SILENT, SILENT]) == [4, 7]


def test_nan_is_a_signal_of_another_kind_and_missing_numbers_are_none() -> None:
    nan = dict.fromkeys(EXTREMES, float("nan"))
    assert warned_steps(NoSignalWatch(patience=2), [SILENT, nan, SILENT, {}, SILENT]) == [5]


def test_the_warning_names_step_count_and_what_to_look_at() -> None:
    watch = NoSignalWatch(patience=1)
    warning = watch.see(7, SILENT)
    assert warning is not None
    assert all(part in warning for part in ("step 7", "1 steps in a row", "rollout.n", "reward"))
