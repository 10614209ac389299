"""The sections of a scenario: what `asyncrl simulate` reads. A scenario is a run's own configuration, and `[sim.*]` beside it.

The docstring under a key is its help text. Times are virtual seconds; lengths are tokens of the model.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from asyncrl.config.distribution import Distribution, NonNegative, constant
from asyncrl.config.learning import ActorConfig, AlgorithmConfig
from asyncrl.config.rewards import RewardConfig
from asyncrl.config.rollout import RolloutConfig
from asyncrl.config.runs import TrainRun
from asyncrl.config.sections import (
    MOST,
    AgentConfig,
    Count,
    DataConfig,
    EvalConfig,
    Positive,
    ReplayConfig,
    Section,
    Share,
    StoreConfig,
    TrainerConfig,
)
from asyncrl.errors import ConfigError
from asyncrl.ports import Json

MOST_TOOLS = 900
"""Ids of a simulated vocabulary that are left for tools."""


class SimPromptsConfig(Section):
    """The rows."""

    count: Positive = 64
    """Rows of the dataset."""
    prompt_len: Distribution = constant(64)
    """Tokens of a prompt; a longer one than data.max_prompt_length allows is cut."""
    val_count: Count = 0
    """Rows that are held out for evaluations. 0: there is none."""


class SimSessionsConfig(Section):
    """What the policy does."""

    turns: Distribution = Distribution(kind="uniform", low=2, high=4)
    """Assistant turns of a session; all but the last call a tool."""
    turns_alike: Share = 0.0
    """Share of a group's sessions that have one number of turns in common: a hard prompt is hard for all of them."""
    calls_a_turn: Distribution = constant(1)
    """Tool calls of a turn that calls, with agent.parallel_tool_calls; they run at the same time."""
    turn_len: Distribution = constant(64)
    """Tokens of a turn."""
    last_len: Distribution = constant(0)
    """Tokens of the last turn, which answers and calls no tool. 0: as of any other."""
    tokens_per_id: Positive = 1
    """Tokens that one simulated id stands for. Times are those of all tokens; limits such as data.max_response_length count ids."""


class SimEngineConfig(Section):
    """Engines, each with rollout.max_num_seqs slots."""

    count: Positive = 1
    """Engines."""
    decode_step_s: NonNegative = 0.01
    """Seconds of a decode step, besides its rows."""
    decode_row_s: NonNegative = 0.0001
    """Seconds that each row of a decode step adds: where it outweighs the step, more rows bring nothing."""
    prefill_call_s: NonNegative = 0.002
    """Seconds of a prefill, besides its tokens. The engine's other rows wait meanwhile."""
    prefill_token_s: NonNegative = 0.00002
    """Seconds that each prompt token of a prefill adds."""
    prefill_tokens: Count = 0
    """Prompt tokens of a prefill at most: requests join together, between steps, as in the embedded engine (4096). 0: at once."""
    down_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds until an engine that died is back."""


class SimToolConfig(Section):
    """One tool."""

    name: str
    """What the policy calls it."""
    weight: NonNegative = 1.0
    """How often it is called, beside the others."""
    latency_s: Distribution = constant(0.1)
    """Seconds of a call."""
    result_len: Distribution = constant(16)
    """Tokens of an answer."""
    is_async: bool = True
    """False: a plain function, which takes a thread."""


class SimRewardConfig(Section):
    """The reward function."""

    latency_s: Distribution = constant(0.01)
    """Seconds of a scoring."""


class SimTrainingConfig(Section):
    """The actor."""

    update_call_s: NonNegative = 0.1
    """Seconds of a pass over a batch, besides its tokens; there are actor.ppo_epochs of them."""
    update_token_s: NonNegative = 0.00005
    """Seconds that each token of the batch adds to a pass."""
    forward_token_s: NonNegative = 0.00002
    """Seconds of a token in a pass for log-probs."""
    stage_s: NonNegative = 0.001
    """Seconds of every other stage, and what each call in the model's thread takes besides its work."""
    snapshot_s: NonNegative = 0.01
    """Seconds of a copy of the weights."""
    publish_s: NonNegative = 0.01
    """Seconds in which the engines take new weights."""
    save_s: NonNegative = 0.5
    """Seconds of a checkpoint."""


class SimJournalConfig(Section):
    """The journal's disk."""

    commit_s: Distribution = constant(0.001)
    """Seconds of a commit; what is queued meanwhile shares the next one."""
    sync_s: Distribution = constant(0.002)
    """Seconds that a synced commit adds."""


class SimTimesConfig(Section):
    """Everything else that takes time."""

    offload_s: NonNegative = 0.0
    """Seconds of a call in a thread, besides what it does."""
    turn_overhead_s: NonNegative = 0.0
    """Seconds that the controller's one loop spends on a turn: turns that end together wait for each other."""
    restart_s: NonNegative = 5.0
    """Seconds between the end of a process and the next one's start."""


class SimFaultsConfig(Section):
    """Rates of faults; which kinds are on is said by `--faults`. Each seed arms some kinds and leaves others out."""

    await_error: Share = 0.002
    """Of the resumes of a session's tasks: an exception in its place."""
    await_cancel: Share = 0.002
    """Of the resumes of a session's tasks: a cancellation from inside."""
    await_hang: Share = 0.0005
    """Of the resumes of a session's guest: it never comes."""
    tool_error: Share = 0.02
    """Of tool calls: they raise."""
    tool_hang: Share = 0.005
    """Of tool calls: they never end."""
    reward_error: Share = 0.01
    """Of scorings: they raise."""
    reward_hang: Share = 0.002
    """Of scorings: they never end."""
    straggler: Share = 0.01
    """Of generate and tool calls: 100 x slower."""
    engine_death: Share = 0.002
    """Of generate calls: their engine dies, and comes back."""
    engine_hang: Share = 0.001
    """Of generate calls: never answered; and for a while their engine makes no step."""
    eval_hang: Share = 0.02
    """Of the generate calls of an evaluation: never answered."""
    late_write: Share = 0.05
    """Of settled sessions: their old attempt writes again."""
    tag_replay: Share = 0.05
    """Of tag updates: delivered twice, late, or in another order."""
    journal_slow: Share = 0.02
    """Of commits: 100 x slower."""
    journal_fail: Share = 0.0005
    """Of commits: the disk is full, and the journal fails for good."""
    site: Share = 0.25
    """Of the passes through an armed site: it pauses."""
    crash: Share = 0.5
    """Of the lives of a controller: it is killed, by the process's end or a power loss: anywhere, in its start, in a checkpoint."""
    sigterm: Share = 0.2
    """Of the lives of a controller: it is asked to stop somewhere, perhaps twice."""
    checkpoint_damage: Share = 0.1
    """Of the restarts: the newest checkpoint cannot be read, where there is an older one."""


class SimConfig(Section):
    """The models of the edges."""

    prompts: SimPromptsConfig = SimPromptsConfig()
    sessions: SimSessionsConfig = SimSessionsConfig()
    engine: SimEngineConfig = SimEngineConfig()
    tools: tuple[SimToolConfig, ...] = (SimToolConfig(name="search"),)
    reward: SimRewardConfig = SimRewardConfig()
    training: SimTrainingConfig = SimTrainingConfig()
    journal: SimJournalConfig = SimJournalConfig()
    times: SimTimesConfig = SimTimesConfig()
    faults: SimFaultsConfig = SimFaultsConfig()
    max_lives: Positive = 40
    """Starts of the controller after which the run is given up."""
    max_s: Annotated[float, Field(gt=0)] = 1e7
    """Virtual seconds after which the run is called endless."""
    vary: tuple[tuple[str, ...], ...] = ()
    """Lists of overrides, `section.key=value`; a seed takes one of each list. "": none."""

    @model_validator(mode="before")
    @classmethod
    def _toml_arrays_are_tuples(cls, data: Json) -> Json:
        if not isinstance(data, dict):
            return data
        tools = {"tools": tuple(data["tools"])} if isinstance(data.get("tools"), list) else {}
        vary = {"vary": tuple(map(_as_tuple, data["vary"]))} if isinstance(data.get("vary"), list) else {}
        return {**data, **tools, **vary}


class Scenario(Section):
    """`asyncrl simulate`: a run whose edges are models. Sections as in a training run; its files and model are not read."""

    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    agent: AgentConfig = AgentConfig()
    reward: RewardConfig = RewardConfig()
    store: StoreConfig = StoreConfig()
    replay: ReplayConfig = ReplayConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    eval: EvalConfig = EvalConfig()
    trainer: TrainerConfig = TrainerConfig()
    sim: SimConfig = SimConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_tools(self.sim.tools)
        if not self.trainer.total_training_steps:
            raise ConfigError("trainer.total_training_steps is 0: a scenario says how many steps it simulates")
        if self.train_run().has_critic:
            raise ConfigError(
                f"algorithm.adv_estimator = {self.algorithm.adv_estimator!r} needs a critic, and a scenario has none; simulate "
                "another estimator, such as 'grpo'"
            )
        return self

    def train_run(self) -> TrainRun:
        """The configuration that the controller sees. Raises ConfigError for what a training run refuses."""
        sections = {name: getattr(self, name) for name in type(self).model_fields if name != "sim"}
        held_out = ["simulated"] if self.sim.prompts.val_count else []
        data = self.data.model_copy(update={"train_files": ["simulated"], "val_files": held_out})
        tools = [tool.name for tool in self.sim.tools] if self.agent.name == "tool_agent" else []
        agent = self.agent.model_copy(update={"tools": tools})
        trainer = self.trainer.model_copy(update={"log_trajectories": 0, "tensorboard": False})
        # There are no micro-batches, so that no budget is too small.
        actor = self.actor.model_copy(update={"ppo_max_token_len_per_gpu": MOST})
        sections |= {"data": data, "agent": agent, "trainer": trainer, "actor": actor, "rollout": self._pool()}
        return TrainRun.model_validate({**sections, "model": {"path": "simulated"}})

    def _pool(self) -> RolloutConfig:
        """Its engines are always a pool, whatever their number. Where the pool's usual limit is too long for it, it is half as long
        as may be: a run of one engine, which has no pool, need not have said anything about it."""
        rollout, usual_s = self.rollout, RolloutConfig().slow_after_s
        slow_after_s = min(usual_s, rollout.hung_after_s / 2) if rollout.slow_after_s == usual_s else rollout.slow_after_s
        return rollout.model_copy(update={"name": "vllm", "num_engines": self.sim.engine.count, "slow_after_s": slow_after_s})


def _as_tuple(value: Json) -> Json:
    return tuple(value) if isinstance(value, list) else value


def _check_tools(tools: tuple[SimToolConfig, ...]) -> None:
    names = [tool.name for tool in tools]
    if not 1 <= len(names) <= MOST_TOOLS:
        raise ConfigError(f"sim.tools has {len(names)} tools; 1 to {MOST_TOOLS} are possible")
    if len(set(names)) < len(names):
        raise ConfigError(f"sim.tools: {names} names a tool twice")
    if not any(tool.weight for tool in tools):
        raise ConfigError(f"sim.tools: the weights of {names} are all 0, so no tool can be chosen")
