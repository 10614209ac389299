"""A small tokenizer with a Hermes template, a run's configuration, and fakes of what stands around the agents."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.agents.chat_template import ChatTemplate
from asyncrl.agents.runner import GroupRunner
from asyncrl.agents.session import SessionParts, session_parts
from asyncrl.agents.text_codec import TextCodec
from asyncrl.agents.tool_runner import ToolRunner
from asyncrl.config import TrainRun, parse_run
from asyncrl.fields import Tag
from asyncrl.keys import TRAIN
from asyncrl.ports import GenerateRequest, Incident, Json, Prompt, RewardRequest, RewardResult, World
from asyncrl.rollout.scripted import ScriptedEngine
from asyncrl.simulation.events import EventLog
from asyncrl.simulation.loop import VirtualLoop
from asyncrl.simulation.world import SimWorld
from asyncrl.tools import Tool, load_tools
from asyncrl.transfer_queue import TransferQueue
from asyncrl.world import RealWorld

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TEMPLATE = resources.files("asyncrl.examples").joinpath("chat_template.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator([TEMPLATE, "the answer is 1 2 3 4 5 6 7 8 9 0, error: tool calculator"] * 20, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=model, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="session")
def codec(tokenizer: PreTrainedTokenizerFast) -> TextCodec:
    made = TextCodec(tokenizer)
    made.prepare()
    return made


@pytest.fixture(scope="session")
def template(codec: TextCodec) -> ChatTemplate:
    return ChatTemplate(codec, tool_schemas=[load_tools(["calculator"])["calculator"].schema])


def make_run(**sections: dict[str, Json]) -> TrainRun:
    agent = {"name": "tool_agent", "tools": ["calculator"], "max_attempts": 1, **sections.pop("agent", {})}
    if agent["name"] == "single_turn":
        del agent["tools"]
    data = {"train_files": ["-"], "max_response_length": 400, **sections.pop("data", {})}
    return parse_run(TrainRun, {"data": data, "model": {"path": "-"}, "rollout": {"n": 2}, "agent": agent, **sections})


@pytest.fixture
def new_run() -> Callable[..., TrainRun]:
    """A TrainRun of a tool agent whose sessions have one attempt; sections as keyword arguments."""
    return make_run


@pytest.fixture
async def world() -> AsyncIterator[RealWorld]:
    async with RealWorld() as real:
        yield real


@pytest.fixture
async def queue() -> AsyncIterator[TransferQueue]:
    async with TransferQueue() as store:
        yield store


@dataclass(slots=True)
class FakeScorer:
    """1 for the right answer, else 0; or whatever `score_with` does. Remembers its requests."""

    score_with: Callable[[RewardRequest], float] | None = None
    delay_s: float = 0.0
    requests: list[RewardRequest] = field(default_factory=list)

    async def score(self, request: RewardRequest) -> RewardResult:
        self.requests.append(request)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        right = request.solution_str == request.ground_truth
        return RewardResult(score=self.score_with(request) if self.score_with else float(right), extra={"length": 3})


@pytest.fixture
def scorer() -> FakeScorer:
    return FakeScorer()


@dataclass(slots=True)
class Rig:
    """A session's surroundings, so that a test says only what is special: the script, the configuration, the tools."""

    template: ChatTemplate
    world: World
    scorer: FakeScorer
    requests: list[GenerateRequest] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    """What runners reported."""

    def call(self, expression: str) -> str:
        return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'

    def engine(self, script: Callable[[GenerateRequest], str | Sequence[int]], context_len: int = 1 << 16) -> ScriptedEngine:
        def answer(request: GenerateRequest) -> Sequence[int]:
            self.requests.append(request)
            said = script(request)
            return self.template.encode_assistant(said) if isinstance(said, str) else said

        return ScriptedEngine(answer, context_len=context_len, decode=lambda ids: self.template.decode(ids))

    def saying(self, *turns: str | Sequence[int], context_len: int = 1 << 16) -> ScriptedEngine:
        """An engine that gives these answers, one a request."""
        left = list(turns)
        return self.engine(lambda _: left.pop(0), context_len)

    def call_then_answer(self, request: GenerateRequest) -> str:
        """Call the calculator in the first turn, answer in the second."""
        return self.call("1 + 2") if request.request_id.endswith("_0") else "3"

    def runner(
        self, queue: TransferQueue, engine: ScriptedEngine, run: TrainRun, tools: Mapping[str, Tool] | None = None
    ) -> GroupRunner:
        chosen = load_tools(["calculator"]) if tools is None else tools
        return GroupRunner(queue, engine, self.scorer, self.template, chosen, run, self.world, report=self.incidents.append)

    def told(self) -> list[tuple[str, str]]:
        """Kind and subject of each incident."""
        return [(str(incident.kind), incident.what) for incident in self.incidents]

    async def tags(self, queue: TransferQueue) -> dict[str, Tag]:
        return (await queue.kv_list(TRAIN))[TRAIN]

    def parts(self, engine: ScriptedEngine, run: TrainRun, tools: dict[str, Tool] | None = None) -> SessionParts:
        runner = ToolRunner(load_tools(["calculator"]) if tools is None else tools, run.agent, self.world)
        return session_parts(
            run,
            engine=engine,
            scorer=self.scorer,
            template=self.template,
            tools=runner,
            world=self.world,
            report=self.incidents.append,
        )


@pytest.fixture
def rig(template: ChatTemplate, world: RealWorld, scorer: FakeScorer) -> Rig:
    return Rig(template, world, scorer)


@pytest.fixture(scope="session")
def in_virtual_time(template: ChatTemplate) -> Callable[[Callable[[Rig], Coroutine[Any, Any, Any]]], Any]:
    """Run `main(rig)` where waiting costs nothing: seconds of back-offs and deadlines can be told exactly."""

    def run(main: Callable[[Rig], Coroutine[Any, Any, Any]], seed: int = 0) -> Any:
        loop = VirtualLoop(seed)
        rig = Rig(template, SimWorld(loop, run_seed=0, log=EventLog()), FakeScorer())
        try:
            return loop.run_until_complete(main(rig))
        finally:
            loop.abandon()

    return run


@pytest.fixture
def prompt() -> Prompt:
    return Prompt(uid="a1", messages=[{"role": "user", "content": "what is 1 + 2?"}], data_source="test", ground_truth="3")
