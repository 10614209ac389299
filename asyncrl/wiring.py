"""Puts the controller of a run together: feed, runner, replay, trainer, on whatever edges it is given.

assembly (the real edges) | simulation (their models) -> [wiring] -> trainer

Nothing here knows a file, a thread or a model. What is the same in a run and in its simulation is made here, and nowhere else.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from asyncrl.agents.runner import GroupRunner
from asyncrl.agents.session import SessionParts, session_parts
from asyncrl.agents.tool_runner import ToolRunner
from asyncrl.chosen import chosen_correction
from asyncrl.config import TrainRun
from asyncrl.evaluation import eval_prompts, evaluate, modes_of
from asyncrl.evaluations import Evaluations, Measure, OpenEngine
from asyncrl.feed import Feed
from asyncrl.observe.incidents import Incidents
from asyncrl.observe.lineage import Lineage
from asyncrl.observe.sight import Sight
from asyncrl.ports import (
    Policy,
    Report,
    RewardScorer,
    RolloutEngine,
    Rows,
    SamplingParams,
    SessionSpan,
    Template,
    Topology,
    ValueFunction,
    World,
    ignore_incident,
)
from asyncrl.recovery import found_groups, open_groups
from asyncrl.replay import Admission, ReplayBuffer
from asyncrl.rollout.pool import EnginePool
from asyncrl.rollout.turn_gate import TurnGate
from asyncrl.stages.advantage import KLCoefficient, advantage_stage
from asyncrl.stages.batch_metrics import batch_metrics_stage
from asyncrl.stages.contract import check_stages
from asyncrl.stages.correction import correction_stage
from asyncrl.stages.old_log_prob import LogProbs, old_log_prob_stages
from asyncrl.stages.ref_log_prob import ref_log_prob_stage
from asyncrl.stages.stage import Stage
from asyncrl.stages.update_actor import LOSS_COLUMNS, update_actor_stage
from asyncrl.stages.update_critic import after_warmup, update_critic_stage
from asyncrl.stages.values import values_stage
from asyncrl.stopping import Stop
from asyncrl.tools import Tool
from asyncrl.trainer import Trainer, give_weights
from asyncrl.transfer_queue import TransferQueue
from asyncrl.waiting import no_stray_cancel


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What sessions need, open: for training and for evaluation alike."""

    engine: RolloutEngine
    scorer: RewardScorer
    template: Template
    tools: dict[str, Tool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """What a controller stands on, open: all that blocks, computes or keeps. `rows`: of training; `val_rows`: of evaluation."""

    world: World
    rollout: Rollout
    queue: TransferQueue
    policy: Policy
    stages: tuple[Stage, ...]
    rows: Rows
    val_rows: Rows | None
    save: Callable[[int], Awaitable[list[int]]]
    """Writes a checkpoint of a step; returns the steps of those that are kept, oldest first."""
    open_sight: Callable[[Lineage, Incidents], AbstractAsyncContextManager[Sight]]
    open_eval_engine: OpenEngine | None = None
    """A second engine of the same model, for an evaluation beside training; None: there is none."""
    rollout_topology: Topology = field(default_factory=Topology)
    watch_sessions: Callable[[SessionSpan], SessionSpan] | None = None
    """Puts its own spans around those of the trace, for whoever wants to see every session."""


@asynccontextmanager
async def open_controller(
    run: TrainRun, edges: Edges, *, stop: Stop, total_steps: int, step: int | None = None, kept: Sequence[int] = ()
) -> AsyncIterator[Trainer]:
    """The rooms between the edges. `step`: steps that the policy's weights have seen, and to which the store was opened; None: a
    new run. kept: steps of the checkpoints that there are, oldest first.

    Leaving ends the groups in flight. Raises StrayCancelError for a cancellation that nobody asked for.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(no_stray_cancel("the controller"))
        world, rollout, queue, begin = edges.world, edges.rollout, edges.queue, step or 0
        incidents = Incidents(world)
        engine = _gated(run, rollout.engine, incidents.report)
        version = begin // run.publish_freq
        if step is not None or not run.rollout.reads_model:
            await give_weights(version, edges.policy, engine, run, world)
        admission = Admission(
            batch_size=run.data.train_batch_size,
            updates=run.publish_freq,
            max_staleness=run.max_staleness,
            version=version,
            total_steps=total_steps,
            found=found_groups(queue, step=begin),
        )
        lineage = _lineage(run, edges, admission)
        spans = lineage.session_span if edges.watch_sessions is None else edges.watch_sessions(lineage.session_span)
        runner = GroupRunner(queue, engine, rollout.scorer, rollout.template, rollout.tools, run, world, spans, incidents.report)
        agents = await stack.enter_async_context(runner)
        sight = await stack.enter_async_context(edges.open_sight(lineage, incidents))
        yield Trainer(
            run=run,
            world=world,
            feed=_feed(run, edges),
            queue=queue,
            agents=agents,
            admission=admission,
            replay=_replay(run, edges, admission, agents, incidents.report),
            actor=edges.policy,
            engine=engine,
            stages=edges.stages,
            evaluations=await open_evaluation(
                run, edges, sight=sight, report=incidents.report, total_steps=total_steps, stack=stack
            ),
            save=edges.save,
            sight=sight,
            report=incidents.report,
            decode=rollout.template.decode,
            stop=stop,
            total_steps=total_steps,
            step=begin,
            open=await open_groups(queue),
            kept=kept,
        )


def _gated(run: TrainRun, engine: RolloutEngine, report: Report) -> RolloutEngine:
    """The engine as sessions and publications share it, which tells what befalls it."""
    if isinstance(engine, EnginePool):
        engine.tell(report)
    if run.rollout.in_flight_updates:
        return engine
    return TurnGate(engine, publish_timeout_s=run.rollout.publish_timeout_s, report=report)


def _lineage(run: TrainRun, edges: Edges, admission: Admission) -> Lineage:
    return Lineage(
        edges.world,
        groups_a_step=run.trainer.trace_groups,
        batch_size=run.data.train_batch_size,
        actor=edges.policy.topology,
        rollout=edges.rollout_topology,
        is_alive=admission.is_alive,
        incarnation=edges.queue.incarnation,
    )


def _replay(run: TrainRun, edges: Edges, admission: Admission, agents: GroupRunner, report: Report) -> ReplayBuffer:
    return ReplayBuffer(
        edges.queue,
        admission,
        group_size=run.rollout.n,
        config=run.replay,
        world=edges.world,
        filter_groups=run.algorithm.filter_groups,
        max_tries=run.trainer.max_step_tries,
        report=report,
        describe=agents.describe,
    )


def _feed(run: TrainRun, edges: Edges) -> Feed:
    """It goes on where the journal says, and passes over rows in quarantine."""
    limit, queue = run.replay.quarantine_after, edges.queue

    def is_left_out(row: int) -> bool:
        return limit > 0 and queue.failures_of(row) >= limit

    return Feed(
        edges.rows,
        edges.world,
        seed=run.trainer.seed,
        shuffle=run.data.shuffle,
        epochs=None,
        cursor=queue.cursor,
        is_left_out=is_left_out,
    )


def stages_of(
    run: TrainRun,
    policy: Policy,
    *,
    reference: LogProbs | None,
    critic: ValueFunction | None = None,
    kl: KLCoefficient | None = None,
) -> tuple[Stage, ...]:
    """The boxes between sample and retire, in order.

    `reference`: log-probs of the frozen model, where a KL term is on; `critic`: where the estimator asks for values; `kl`: the
    coefficient of the KL in the reward, where it is taken off. Raises ConfigError as `asyncrl.chosen` does.
    """
    options = chosen_correction(run.algorithm)
    with_squares = run.needs_sum_pi_squared
    log_probs = policy.log_probs_and_squares if with_squares else policy.log_probs
    old = old_log_prob_stages(run.old_log_probs, log_probs, with_squares=with_squares)
    ref = () if reference is None else (ref_log_prob_stage(reference),)
    values = () if critic is None else (values_stage(critic.values),)
    correction = (correction_stage(options),) if run.old_log_probs == "recompute" else ()
    has_is_weights = bool(correction) and options.rollout_is is not None
    advantage = advantage_stage(run.algorithm, kl=kl, has_is_weights=has_is_weights)
    before = (*old, *ref, *values, *correction, advantage)
    written = frozenset[str]().union(*(stage.writes for stage in before))
    update = update_actor_stage(policy.update, columns=written & LOSS_COLUMNS)
    learned = () if critic is None else (update_critic_stage(critic.update, has_loss_weights="loss_weights" in written),)
    stages = (*before, *learned, after_warmup(update, run.trainer.critic_warmup), batch_metrics_stage())
    check_stages(stages, row_fields={"reward_baselines"} if run.needs_baseline else ())
    return stages


async def open_measure(
    run: TrainRun,
    rows: Rows | None,
    rollout: Rollout,
    world: World,
    stack: AsyncExitStack,
    report: Report = ignore_incident,
) -> Measure | None:
    """Runs the modes of `run.eval` on the rows and gives their `eval/<mode>/*` numbers; None when there is nothing to run."""
    modes = modes_of(run.eval)
    if rows is None or not modes:
        return None
    prompts = eval_prompts(rows)
    tools = await stack.enter_async_context(ToolRunner(rollout.tools, run.agent, world))
    pairs = [(mode, _eval_parts(run, rollout, tools, world, mode.sampling, report)) for mode in modes]
    for _, parts in pairs:
        stack.push_async_callback(parts.guests.close)

    async def run_modes(engine: RolloutEngine, version: int) -> dict[str, float]:
        numbers: dict[str, float] = {}
        for mode, parts in pairs:
            numbers.update(await evaluate(prompts, mode, replace(parts, engine=engine), version=version))
        return numbers

    return run_modes


async def open_evaluation(
    run: TrainRun, edges: Edges, *, sight: Sight, report: Report, total_steps: int, stack: AsyncExitStack
) -> Evaluations:
    """The evaluations of a run; leaving the stack ends the one that runs."""
    evaluations = Evaluations(
        await open_measure(run, edges.val_rows, edges.rollout, edges.world, stack, report),
        run=run,
        world=edges.world,
        policy=edges.policy,
        engine=edges.rollout.engine,
        open_engine=edges.open_eval_engine,
        queue=edges.queue,
        sight=sight,
        report=report,
        total_steps=total_steps,
    )
    stack.push_async_callback(evaluations.close)
    return evaluations


def _eval_parts(
    run: TrainRun, rollout: Rollout, tools: ToolRunner, world: World, sampling: SamplingParams, report: Report
) -> SessionParts:
    return session_parts(
        run,
        engine=rollout.engine,
        scorer=rollout.scorer,
        template=rollout.template,
        tools=tools,
        world=world,
        sampling=sampling,
        report=report,
    )
