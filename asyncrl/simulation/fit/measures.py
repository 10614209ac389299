"""Every number of a scenario that a run's folder tells, and in words where it came from.

run_data -> [measures] -> scenario. What was not measured keeps the scenario's default.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from asyncrl.config import TrainRun
from asyncrl.ports import Json
from asyncrl.rollout.model_runner import MAX_PREFILL_TOKENS
from asyncrl.simulation.fit.lines import Line, line_of_points, line_of_sums
from asyncrl.simulation.fit.run_data import Call, RunData, Session, Step, Turn
from asyncrl.simulation.fit.values import distribution_of, likeness, mean_of, quantile, rounded

LEAST_GROUPS = 8
"""Traced groups below which nothing is said about how alike the sessions of a group are."""
FLOOR = 0.1
"""Quantile of a wait at which it is only what it waits for: the others met a busy loop as well."""
SIMULATED_COMMITS = 3
"""Commits between the end of a simulated step's stages and its publication."""
NO_TOOL = "no_tool"
SMALL_STAGES = ("advantage", "batch_metrics")
FORWARDS = ("old_log_prob", "ref_log_prob")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A key of a scenario below `sim`, its value as TOML has it, and where it came from."""

    key: str
    value: Json
    why: str


def facts_of(data: RunData) -> list[Fact]:
    """In the order of the keys. Raises nothing: `read_run` has seen to it that there is enough."""
    commit_s = _commit_s(data)
    return [
        *_prompts(data),
        *_sessions(data),
        *_engine(data),
        *_tools(data),
        *_reward(data),
        *_training(data, commit_s),
        *_journal(data, commit_s),
        *_controller(data),
    ]


def is_tool_agent(data: RunData) -> bool:
    """Does a session go on after a turn?"""
    return data.run.agent.name == "tool_agent" or any(session.calls for session in data.sessions)


# --- what the policy and its surroundings do --------------------------------------------------------------------------------------


def _prompts(data: RunData) -> Iterator[Fact]:
    admitted, epoch = (data.steps[-1].numbers.get(name, 0.0) for name in ("admission/admitted", "training/epoch"))
    if admitted and epoch:
        yield Fact(key="prompts.count", value=max(1, round(admitted / epoch)), why="prompts handed out / training/epoch")
    lengths = {session.uid: session.turns[0].num_prompt_tokens for session in data.sessions}
    yield _lengths("prompts.prompt_len", list(lengths.values()), "prompts of traced groups")


def _sessions(data: RunData) -> Iterator[Fact]:
    last = [session.turns[-1].num_tokens for session in data.sessions]
    if not is_tool_agent(data):
        yield _lengths("sessions.turn_len", last, "traced sessions")
        return
    yield _lengths("sessions.turns", [len(session.turns) for session in data.sessions], "traced sessions")
    yield from _alike(data)
    others = [turn.num_tokens for session in data.sessions for turn in session.turns[:-1]]
    if data.run.agent.parallel_tool_calls and others:
        calls = [len(calls) for session in data.sessions for _, calls, _ in _between_turns(session) if calls]
        yield _lengths("sessions.calls_a_turn", calls or [1], "turns with calls")
    yield _lengths("sessions.turn_len", others or last, "turns that were not the last" if others else "turns")
    if others:
        yield _lengths("sessions.last_len", last, "last turns")


def _alike(data: RunData) -> Iterator[Fact]:
    """Two sessions have a draw in common where both take the group's: the square of the share of those that do."""
    groups: dict[str, list[float]] = {}
    for session in data.sessions:
        groups.setdefault(session.uid, []).append(float(len(session.turns)))
    common = likeness(list(groups.values())) if len(groups) >= LEAST_GROUPS else None
    if common is not None:
        why = f"correlation {max(common, 0.0):.2g} of turns within {len(groups)} groups, its root"
        yield Fact(key="sessions.turns_alike", value=rounded(min(max(common, 0.0), 1.0) ** 0.5), why=why)


def _between_turns(session: Session) -> Iterator[tuple[Turn, tuple[Call, ...], Turn]]:
    """A turn, the calls between it and the next one, and that."""
    for turn, after in pairwise(session.turns):
        yield turn, tuple(call for call in session.calls if turn.end_s <= call.start_s <= after.start_s), after


def _tools(data: RunData) -> Iterator[Fact]:
    """A turn that went on without a call (it was malformed, or of no tool) called one that takes no time."""
    latencies: dict[str, list[float]] = {}
    for session in data.sessions:
        for call in session.calls:
            latencies.setdefault(call.name, []).append(call.end_s - call.start_s)
    results = _result_lengths(data)
    tools = [_tool(name, times, results.get(name, [])) for name, times in sorted(latencies.items())]
    refused = results.get(NO_TOOL, [])
    if refused:
        tools.append(_tool(NO_TOOL, [0.0] * len(refused), refused))
    if tools:
        told = [f"{name} {len(times)} x {mean_of(times):.4g} s" for name, times in sorted(latencies.items())]
        told += [f"{NO_TOOL}: {len(refused)} turns that went on without a call"] if refused else []
        yield Fact(
            key="tools", value=tools, why=f"tool spans of traced sessions ({', '.join(told)}); results: growth of the prompts"
        )


def _tool(name: str, times: Sequence[float], results: Sequence[float]) -> dict[str, Json]:
    return {
        "name": name,
        "weight": float(len(times)),
        "latency_s": distribution_of(times).model_dump(),
        "result_len": distribution_of(results or [1]).model_dump(),
    }


def _result_lengths(data: RunData) -> dict[str, list[float]]:
    """Tokens that a call's answer adds; the template of a simulated one adds an end token, where a call ended the turn, and the
    mark of the next turn."""
    around = 1 if data.run.agent.parallel_tool_calls else 2
    found: dict[str, list[float]] = {}
    for session in data.sessions:
        for turn, calls, after in _between_turns(session):
            grown = after.num_prompt_tokens - turn.num_prompt_tokens - turn.num_tokens - around
            names = [call.name for call in calls] or [NO_TOOL]
            for name in names:
                found.setdefault(name, []).append(max(1.0, grown / len(names)))
    return found


def _reward(data: RunData) -> Iterator[Fact]:
    times = [session.reward_s[1] - session.reward_s[0] for session in data.sessions if session.reward_s]
    value = distribution_of(times).model_dump() if times else 0.0
    yield Fact(key="reward.latency_s", value=value, why=f"{len(times)} reward spans, mean {mean_of(times):.4g} s")


# --- the engine -------------------------------------------------------------------------------------------------------------------


def _engine(data: RunData) -> Iterator[Fact]:
    decode = _line_of(data.steps, "decode", "steps", "rows")
    alike = "" if decode.is_certain else "; all steps had as many rows: what a row adds cannot be told"
    why = f"least squares over {decode.count:.0f} decode steps{alike}"
    if data.run.rollout.num_engines > 1:
        yield Fact(key="engine.count", value=data.run.rollout.num_engines, why="rollout.num_engines")
    yield Fact(key="engine.decode_step_s", value=rounded(decode.base_s), why=why)
    yield Fact(key="engine.decode_row_s", value=rounded(decode.slope_s), why="the same")
    prefill = _line_of(data.steps, "prefill", "calls", "tokens")
    alike = "" if prefill.is_certain else "; all had as many tokens: what a token adds cannot be told"
    why = f"least squares over {prefill.count:.0f} prefills{alike}"
    yield Fact(key="engine.prefill_call_s", value=rounded(prefill.base_s), why=why)
    yield Fact(key="engine.prefill_token_s", value=rounded(prefill.slope_s), why="the same")
    yield Fact(key="engine.prefill_tokens", value=MAX_PREFILL_TOKENS, why="of the embedded engine")


def _line_of(steps: Sequence[Step], kind: str, noun: str, size: str) -> Line:
    names = (f"{kind}_{noun}", f"{kind}_{size}", f"{kind}_{size}_sq", f"{kind}_s", f"{kind}_{size}_s")
    count, sizes, squares, seconds, products = (sum(step.rates.get(name, 0.0) for step in steps) for name in names)
    return line_of_sums(count, sizes, squares, seconds, products)


# --- training ---------------------------------------------------------------------------------------------------------------------


def _training(data: RunData, commit_s: float) -> Iterator[Fact]:
    small = [_timing(step, name) for step in data.steps for name in SMALL_STAGES if _timing(step, name)]
    stage_s = median(small) if small else 0.0
    yield from _updates(data, stage_s)
    yield Fact(key="training.stage_s", value=rounded(stage_s), why=f"median of {len(small)} small stages")
    yield Fact(key="training.snapshot_s", value=0.0, why="a part of publish_s")
    border_s, save_s = _borders(data)
    publish_s = mean_of([_timing(step, "publish") for step in data.steps])
    rest_s = max(border_s - SIMULATED_COMMITS * commit_s, 0.0)
    why = f"timing_s/publish, mean of {len(data.steps)} steps, and {rest_s:.4g} s between the stages and it"
    yield Fact(key="training.publish_s", value=rounded(max(publish_s - stage_s, 0.0) + rest_s), why=why)
    if save_s is not None:
        yield Fact(key="training.save_s", value=rounded(save_s), why="what the steps with a checkpoint took longer")


def _updates(data: RunData, stage_s: float) -> Iterator[Fact]:
    passes, tokens = data.run.actor.ppo_epochs, [_num_tokens(data, step) for step in data.steps]
    times = [max(_timing(step, "update_actor") - stage_s, 0.0) / passes for step in data.steps]
    update = line_of_points(tokens, times)
    alike = "" if update.is_certain else "; their sizes are alike, or the noise hides the difference: proportional"
    why = f"timing_s/update_actor of {len(times)} steps against their tokens{alike}"
    yield Fact(key="training.update_call_s", value=rounded(update.base_s), why=why)
    yield Fact(key="training.update_token_s", value=rounded(update.slope_s), why="the same")
    forwards = [
        (_timing(step, name) - stage_s, size)
        for step, size in zip(data.steps, tokens, strict=True)
        for name in FORWARDS
        if _timing(step, name)
    ]
    if forwards:
        seconds, size = (sum(column) for column in zip(*forwards, strict=True))
        why = f"{len(forwards)} stages that compute log-probs"
        yield Fact(key="training.forward_token_s", value=rounded(max(seconds, 0.0) / max(size, 1.0)), why=why)


def _timing(step: Step, name: str) -> float:
    return step.numbers.get(f"timing_s/{name}", 0.0)


def _num_tokens(data: RunData, step: Step) -> float:
    """Of the batch, prompts included."""
    return step.numbers.get("global_seqlen/mean", 0.0) * data.num_ranks


def _borders(data: RunData) -> tuple[float, float | None]:
    """Median seconds between the stages of a step and its publication, and what a checkpoint adds to those after it."""
    border_s = median(data.borders_s.values()) if data.borders_s else 0.0
    plain = [seconds for step, seconds in data.gaps_s.items() if not _saves(data.run, data.last_step, step)]
    saving = [seconds for step, seconds in data.gaps_s.items() if _saves(data.run, data.last_step, step)]
    return border_s, max(mean_of(saving) - median(plain), 0.0) if plain and saving else None


def _saves(run: TrainRun, last_step: int, step: int) -> bool:
    return step == last_step or (run.trainer.save_freq > 0 and step % run.trainer.save_freq == 0)


# --- the journal ------------------------------------------------------------------------------------------------------------------


def _commit_s(data: RunData) -> float:
    """After its last turn a session waits for nothing but a commit before it is scored."""
    if not data.run.store.journal:
        return 0.0
    waits = [session.reward_s[0] - session.turns[-1].end_s for session in data.sessions if session.reward_s]
    return quantile(waits, FLOOR) if waits else 0.0


def _journal(data: RunData, commit_s: float) -> Iterator[Fact]:
    if data.run.store.journal:
        why = f"waits between the last turn and the reward, quantile {FLOOR:g} of {len(data.sessions)} sessions"
        yield Fact(key="journal.commit_s", value=rounded(commit_s), why=why)


# --- the controller ---------------------------------------------------------------------------------------------------------------


def _controller(data: RunData) -> Iterator[Fact]:
    """All that its thread computes in a step, shared out to the step's turns: they are what there are many of."""
    used = [
        (step.numbers["loop_lag/cpu_s"], step.numbers.get("num_turns/mean", 0.0))
        for step in data.steps
        if "loop_lag/cpu_s" in step.numbers and step.wall_s is not None
    ]
    sessions = data.run.data.train_batch_size * data.run.rollout.n
    turns = sum(num_turns for _, num_turns in used) * sessions
    if turns:
        cpu_s = sum(seconds for seconds, _ in used)
        why = f"CPU seconds of the controller's thread in {len(used)} steps, {cpu_s:.4g}, for {turns:.0f} turns"
        yield Fact(key="times.turn_overhead_s", value=rounded(cpu_s / turns), why=why)


# --- words ------------------------------------------------------------------------------------------------------------------------


def _lengths(key: str, values: Sequence[float], what: str) -> Fact:
    common = Counter(values).most_common(1)[0][0]
    why = f"{len(values)} {what}: {min(values):g} to {max(values):g}, mean {mean_of(values):.4g}, most often {common:g}"
    return Fact(key=key, value=distribution_of(values).model_dump(), why=why)
