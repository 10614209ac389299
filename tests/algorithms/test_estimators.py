"""Every estimator against a plain float64 reference in Python, and against what must not change its answer.

Invariants: how sessions are cut into rows, padding rows, padding columns, the order of the rows, and what stands outside the mask.
Legend: B rows, R response tokens, S sessions.
"""

import inspect
import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from asyncrl.algorithms.advantages.registry import ESTIMATORS
from asyncrl.algorithms.sessions import Packing, session_rewards

WIDTH = 7
VARIANTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *((name, {}) for name in ESTIMATORS),
    ("gae", {"gamma": 0.9, "lam": 0.8}),
    ("grpo", {"norm_adv_by_std_in_grpo": False}),
    ("grpo_passk", {"norm_adv_by_std_in_grpo": False}),
    ("reinforce_plus_plus", {"gamma": 0.9}),
    ("gpg", {"gpg_f_norm": 2.0}),
    ("gdpo", {"norm_adv_by_std_in_grpo": False, "gdpo_reward_weights": [0.5, 2.0]}),
    ("gdpo", {"gdpo_reward_keys": ["form"], "gdpo_reward_weights": [3.0]}),
    ("optimal_token_baseline", {"otb_handle_zero_tail": False}),
    ("tir_optimal_token_baseline", {"otb_handle_zero_tail": False}),
)
every_variant = pytest.mark.parametrize(("name", "options"), VARIANTS)
few = settings(max_examples=6)
"""Of each variant: seconds in all. `test_many_seeds` takes more."""
seeds = st.integers(0, 2**32)


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """Whole sessions, one a row: what each estimator sees once it is packed."""

    lengths: list[int]
    inputs: AdvantageInputs


def _sessions(seed: int) -> Sessions:
    """1-10 sessions of 0-7 tokens in up to 4 groups, with gaps and rewards on any token; groups are often constant."""
    rng = random.Random(seed)
    lengths = [rng.randint(0, WIDTH) for _ in range(rng.randint(1, 10))]
    inside = torch.arange(WIDTH) < torch.tensor(lengths)[:, None]
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), WIDTH)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    dense = noise(*shape) if rng.random() < 0.3 else torch.zeros(shape, dtype=torch.float64)
    scores = _scored(lengths, [rng.choice([0.0, 0.1, 0.97, 1.0]) for _ in lengths], WIDTH)
    probs = torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1
    inputs = AdvantageInputs(
        rewards_BR=torch.where(inside, scores + dense, 0.0),
        mask_BR=inside & (torch.rand(shape, generator=generator) < 0.7),
        groups_B=torch.tensor([rng.randint(5, 8) for _ in lengths]),
        values_BR=noise(*shape),
        reward_baselines_B=noise(len(lengths)),
        components={"truth": scores.sum(1), "form": torch.tensor([float(rng.randint(0, 1)) for _ in lengths], dtype=torch.float64)},
        old_log_probs_BR=probs.log(),
        sum_pi_squared_BR=probs.square() + 0.01,
        rollout_is_weights_BR=noise(*shape).exp() if rng.random() < 0.5 else None,
    )
    return Sessions(lengths=lengths, inputs=inputs)


def _scored(lengths: list[int], scores: list[float], width: int) -> torch.Tensor:
    """[B, width]: each score on its row's last token."""
    scored = torch.zeros(len(lengths), width, dtype=torch.float64)
    for row, (length, score) in enumerate(zip(lengths, scores, strict=True)):
        if length:
            scored[row, length - 1] = score
    return scored


def _changed(inputs: AdvantageInputs, change: Callable[[str, torch.Tensor], torch.Tensor]) -> AdvantageInputs:
    """The inputs with every tensor put through change(name, tensor)."""
    columns: dict[str, Any] = {
        name: getattr(inputs, name) for name in inspect.signature(AdvantageInputs).parameters if name != "components"
    }
    changed: dict[str, Any] = {name: None if column is None else change(name, column) for name, column in columns.items()}
    components = {name: change(name, values) for name, values in (inputs.components or {}).items()}
    return AdvantageInputs(**changed, components=components)


def _same(got: Advantages, want: Advantages) -> None:
    # whitening multiplies the last bit by up to 1 / sqrt(1e-8)
    torch.testing.assert_close(got.advantages_BR, want.advantages_BR, rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(got.returns_BR, want.returns_BR, rtol=1e-12, atol=1e-11)


# The reference: one number after the other


def _slow(name: str, inputs: AdvantageInputs, options: Mapping[str, Any]) -> tuple[list[list[float]], list[list[float]]]:
    """(advantages, returns) by the formulas, as nested lists."""
    rewards, mask, groups = inputs.rewards_BR.tolist(), inputs.mask_BR.tolist(), inputs.groups_B.tolist()
    totals, rows = [math.fsum(row) for row in rewards], range(len(rewards))
    peers = [[other for other in rows if groups[other] == groups[row]] for row in rows]
    norm = options.get("norm_adv_by_std_in_grpo", True)

    def spread(numbers: list[float]) -> list[list[float]]:
        return [[number if inside else 0.0 for inside in row] for number, row in zip(numbers, mask, strict=True)]

    def grpo(values: list[float]) -> list[float]:
        centred = [_centred(values, peers[row], row, statistics.fmean(values[peer] for peer in peers[row])) for row in rows]
        stds = [statistics.stdev([values[peer] for peer in peers[row]]) if len(peers[row]) > 1 else 1.0 for row in rows]
        return [value / (std + 1e-6) if norm else value for value, std in zip(centred, stds, strict=True)]

    def outcome() -> list[float]:
        if name == "grpo":
            return grpo(totals)
        means = [statistics.fmean(totals[peer] for peer in peers[row]) for row in rows]
        centred = [_centred(totals, peers[row], row, means[row]) for row in rows]
        if name == "rloo":
            others = [[peer for peer in peers[row] if peer != row] for row in rows]
            less = [totals[row] - statistics.fmean(totals[peer] for peer in others[row]) if others[row] else 0.0 for row in rows]
            return [value if centred[row] else 0.0 for row, value in enumerate(less)]
        if name == "opo":
            tokens = [sum(row) for row in mask]
            weighed = [sum(tokens[p] * totals[p] for p in peers[row]) / max(sum(tokens[p] for p in peers[row]), 1) for row in rows]
            return [_centred(totals, peers[row], row, weighed[row]) for row in rows]
        if name == "gpg":
            counted = [row for row in rows if any(mask[row])]
            alpha = len(counted) / max(sum(totals[row] != 0 for row in counted), 1)
            return [alpha * value / options.get("gpg_f_norm", 1.0) for value in centred]
        if name == "grpo_passk":
            return [_lead(totals, peers[row], row, norm=norm) for row in rows]
        return centred

    if name in ("grpo", "rloo", "opo", "gpg", "grpo_passk"):
        return (spread(outcome()),) * 2
    if name == "reinforce_plus_plus_baseline":
        return (_whitened(spread(outcome()), mask),) * 2
    if name == "gdpo":
        names = options.get("gdpo_reward_keys") or ["form", "truth"]
        weights = options.get("gdpo_reward_weights") or [1.0] * len(names)
        parts = [grpo((inputs.components or {})[key].tolist()) for key in names]
        return (_whitened(spread([sum(w * part[row] for w, part in zip(weights, parts, strict=True)) for row in rows]), mask),) * 2
    returns = [_returns(rewards[row], mask[row], options.get("gamma", 1.0)) for row in rows]
    if name == "reinforce_plus_plus":
        return _whitened(returns, mask), returns
    if name == "remax":
        baselines = _of(inputs.reward_baselines_B)
        return [[value - baselines[row] if mask[row][t] else 0.0 for t, value in enumerate(returns[row])] for row in rows], returns
    if name == "gae":
        gae = [_gae(rewards[row], _of(inputs.values_BR)[row], mask[row], options) for row in rows]
        values = _of(inputs.values_BR)
        targets = [[a + values[row][t] if mask[row][t] else 0.0 for t, a in enumerate(gae[row])] for row in rows]
        return _whitened(gae, mask), targets
    is_closed = name.startswith("tir")
    return [_less_baseline(row, peers[row], returns, inputs, options, is_closed=is_closed) for row in rows], returns


def _of(column: torch.Tensor | None) -> Any:
    assert column is not None
    return column.tolist()


def _centred(values: list[float], peers: list[int], row: int, baseline: float) -> float:
    return 0.0 if len({values[peer] for peer in peers}) == 1 else values[row] - baseline


def _lead(values: list[float], peers: list[int], row: int, *, norm: bool) -> float:
    best, *others = sorted((values[peer] for peer in peers), reverse=True)
    if not others or values[row] != best or best == others[0]:
        return 0.0
    return (best - others[0]) / (statistics.stdev([best, *others]) + 1e-6 if norm else 1.0)


def _whitened(values: list[list[float]], mask: list[list[bool]]) -> list[list[float]]:
    inside = [v for row, row_mask in zip(values, mask, strict=True) for v, m in zip(row, row_mask, strict=True) if m]
    scale = 1 / math.sqrt(statistics.variance(inside) + 1e-8) if len(set(inside)) > 1 else 0.0
    mean = statistics.fmean(inside) if inside else 0.0
    return [
        [(v - mean) * scale if m else 0.0 for v, m in zip(row, row_mask, strict=True)]
        for row, row_mask in zip(values, mask, strict=True)
    ]


def _actions(mask: list[bool]) -> list[int]:
    return [t for t, inside in enumerate(mask) if inside]


def _earned(rewards: list[float], mask: list[bool]) -> list[float]:
    """What each policy token earned: its reward and those up to the next policy token."""
    return [sum(rewards[start:end]) for start, end in itertools.pairwise([*_actions(mask), len(mask)])]


def _returns(rewards: list[float], mask: list[bool], gamma: float) -> list[float]:
    earned, returns = _earned(rewards, mask), [0.0] * len(mask)
    for k, t in enumerate(_actions(mask)):
        returns[t] = sum(gamma**later * reward for later, reward in enumerate(earned[k:]))
    return returns


def _gae(rewards: list[float], values: list[float], mask: list[bool], options: Mapping[str, Any]) -> list[float]:
    gamma, lam = options.get("gamma", 1.0), options.get("lam", 1.0)
    actions, advantages = _actions(mask), [0.0] * len(mask)
    known = [values[t] for t in actions] + [0.0]
    deltas = [reward + gamma * known[k + 1] - known[k] for k, reward in enumerate(_earned(rewards, mask))]
    for k, t in enumerate(actions):
        advantages[t] = sum((gamma * lam) ** later * delta for later, delta in enumerate(deltas[k:]))
    return advantages


def _less_baseline(
    row: int, peers: list[int], returns: list[list[float]], inputs: AdvantageInputs, options: Mapping[str, Any], *, is_closed: bool
) -> list[float]:
    mask, result = inputs.mask_BR.tolist(), [0.0] * inputs.mask_BR.shape[1]
    if len(peers) == 1:
        return result
    places = {peer: _actions(mask[peer]) if is_closed else list(range(len(mask[peer]))) for peer in peers}
    ends = {peer: max((k + 1 for k, t in enumerate(places[peer]) if mask[peer][t]), default=0) for peer in peers}
    second = sorted(ends.values())[-2]
    for column, t in enumerate(places[row]):
        if not mask[row][t]:
            continue
        here = [(peer, places[peer][column]) for peer in peers if column < len(places[peer]) and mask[peer][places[peer][column]]]
        energies = [_energy(inputs, peer, until) + 1e-8 for peer, until in here]
        theirs = [returns[peer][until] for peer, until in here]
        baseline = sum(e * g for e, g in zip(energies, theirs, strict=True)) / sum(energies)
        result[t] = returns[row][t] - baseline if len(set(theirs)) > 1 else 0.0
        if options.get("otb_handle_zero_tail", True) and column >= second:
            result[t] = returns[row][t]
    return result


def _energy(inputs: AdvantageInputs, row: int, until: int) -> float:
    probs, squares = torch.exp(torch.tensor(_of(inputs.old_log_probs_BR)[row])).tolist(), _of(inputs.sum_pi_squared_BR)[row]
    weights = [1.0] * len(probs) if inputs.rollout_is_weights_BR is None else inputs.rollout_is_weights_BR.tolist()[row]
    steps = [t for t in _actions(inputs.mask_BR.tolist()[row]) if t <= until]
    return math.fsum((1 - 2 * math.exp(_of(inputs.old_log_probs_BR)[row][t]) + squares[t]) * weights[t] ** 2 for t in steps)


@every_variant
@few
@given(seed=seeds)
def test_against_a_plain_float64_reference(name: str, options: Mapping[str, Any], seed: int) -> None:
    inputs = _sessions(seed).inputs
    got = ESTIMATORS[name](inputs, **options)
    advantages, returns = _slow(name, inputs, options)
    torch.testing.assert_close(got.advantages_BR, torch.tensor(advantages, dtype=torch.float64), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(got.returns_BR, torch.tensor(returns, dtype=torch.float64), rtol=1e-7, atol=1e-7)
    assert not got.advantages_BR[~inputs.mask_BR].any()
    assert not got.returns_BR[~inputs.mask_BR].any()


# What must not matter


@every_variant
@few
@given(seed=seeds)
def test_how_sessions_are_cut_into_rows_does_not_matter(name: str, options: Mapping[str, Any], seed: int) -> None:
    whole = _sessions(seed)
    want = ESTIMATORS[name](whole.inputs, **options)
    pieces = _cut(whole.lengths, random.Random(seed))
    sessions_B = torch.tensor([session for session, _, _ in pieces])
    packing = Packing.of(torch.tensor([end - start for _, start, end in pieces]), sessions_B, num_columns=WIDTH)

    def cut(name: str, column: torch.Tensor) -> torch.Tensor:
        return _rows(column, pieces) if name.endswith("_BR") else column[sessions_B]

    cut_inputs = _changed(whole.inputs, cut)
    got = ESTIMATORS[name](cut_inputs.packed(packing), **options).unpacked(packing)
    _same(got, Advantages(advantages_BR=_rows(want.advantages_BR, pieces), returns_BR=_rows(want.returns_BR, pieces)))


def _cut(lengths: list[int], rng: random.Random) -> list[tuple[int, int, int]]:
    """(session, start, end) of each row: sessions cut anywhere, some rows empty, and mixed; those of a session stay in order."""
    waiting = []
    for session, length in enumerate(lengths):
        cuts = [0, *sorted(rng.randint(0, length) for _ in range(rng.randint(0, 3))), length]
        waiting.append([(session, start, end) for start, end in itertools.pairwise(cuts)])
    pieces = []
    while waiting := [rows for rows in waiting if rows]:
        pieces.append(rng.choice(waiting).pop(0))
    return pieces


def _rows(column_SR: torch.Tensor, pieces: list[tuple[int, int, int]]) -> torch.Tensor:
    rows = column_SR.new_zeros(len(pieces), WIDTH)
    for row, (session, start, end) in enumerate(pieces):
        rows[row, : end - start] = column_SR[session, start:end]
    return rows


@given(seeds)
def test_the_score_that_stands_on_each_row_of_a_session_counts_once(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, WIDTH) for _ in range(6)]
    scores = [rng.choice([0.0, 1.0, 0.3]) for _ in lengths]
    pieces = _cut(lengths, rng)
    rows_lengths = [end - start for _, start, end in pieces]
    sessions_B = torch.tensor([session for session, _, _ in pieces])
    packing = Packing.of(torch.tensor(rows_lengths), sessions_B, num_columns=WIDTH)
    on_every_row = _scored(rows_lengths, [scores[session] for session, _, _ in pieces], WIDTH)
    packed = packing.pack(session_rewards(on_every_row, packing))
    order = list(dict.fromkeys(session for session, _, _ in pieces))
    want = _scored([lengths[session] for session in order], [scores[session] for session in order], packed.shape[1])
    assert torch.equal(packed, want)


@every_variant
@few
@given(seed=seeds)
def test_padding_rows_and_columns_change_nothing(name: str, options: Mapping[str, Any], seed: int) -> None:
    rng, inputs = random.Random(seed), _sessions(seed).inputs
    num = len(inputs.groups_B)
    order = torch.tensor(rng.sample(range(num + 3), num + 3))

    def padded(name: str, column: torch.Tensor) -> torch.Tensor:
        width = WIDTH + 2
        filled = column.new_full((num + 3, width) if name.endswith("_BR") else (num + 3,), 0 if name in ZERO else 1)
        filled[:num, ...] = torch.nn.functional.pad(column, (0, 2)) if name.endswith("_BR") else column
        if name == "groups_B":
            filled[num:] = torch.tensor([100, 101, 102])
        return filled[order]

    got = ESTIMATORS[name](_changed(inputs, padded), **options)
    want = ESTIMATORS[name](inputs, **options)
    back = torch.argsort(order)
    assert not got.advantages_BR[back][num:].any()
    advantages_BR, returns_BR = (column[back][:num, :WIDTH] for column in (got.advantages_BR, got.returns_BR))
    _same(Advantages(advantages_BR=advantages_BR, returns_BR=returns_BR), want)


ZERO = ("rewards_BR", "mask_BR")
"""0 on padding; all other columns hold something that must have no effect."""


@every_variant
@few
@given(seed=seeds)
def test_numbers_outside_the_mask_have_no_effect(name: str, options: Mapping[str, Any], seed: int) -> None:
    inputs = _sessions(seed).inputs

    def spoilt(name: str, column: torch.Tensor) -> torch.Tensor:
        is_read_there = name in ("rewards_BR", "mask_BR") or not name.endswith("_BR")
        return column if is_read_there else torch.where(inputs.mask_BR, column, torch.nan)

    _same(ESTIMATORS[name](_changed(inputs, spoilt), **options), ESTIMATORS[name](inputs, **options))


@every_variant
@few
@given(seed=seeds)
def test_the_order_of_the_rows_does_not_matter(name: str, options: Mapping[str, Any], seed: int) -> None:
    inputs = _sessions(seed).inputs
    order = torch.tensor(random.Random(seed).sample(range(len(inputs.groups_B)), len(inputs.groups_B)))
    want = ESTIMATORS[name](inputs, **options)
    got = ESTIMATORS[name](_changed(inputs, lambda _, column: column[order]), **options)
    _same(got, Advantages(advantages_BR=want.advantages_BR[order], returns_BR=want.returns_BR[order]))


@every_variant
def test_float32_gives_float32(name: str, options: Mapping[str, Any]) -> None:
    inputs = _sessions(3).inputs
    low = _changed(inputs, lambda _, column: column.float() if column.is_floating_point() else column)
    got, want = ESTIMATORS[name](low, **options), ESTIMATORS[name](inputs, **options)
    assert {got.advantages_BR.dtype, got.returns_BR.dtype} == {torch.float32}
    assert {want.advantages_BR.dtype, want.returns_BR.dtype} == {torch.float64}
    torch.testing.assert_close(got.advantages_BR, want.advantages_BR.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.long
@every_variant
def test_many_seeds(name: str, options: Mapping[str, Any]) -> None:
    for seed in range(500):
        for check in (
            test_against_a_plain_float64_reference,
            test_how_sessions_are_cut_into_rows_does_not_matter,
            test_padding_rows_and_columns_change_nothing,
            test_numbers_outside_the_mask_have_no_effect,
            test_the_order_of_the_rows_does_not_matter,
        ):
            check.hypothesis.inner_test(name=name, options=options, seed=seed)
