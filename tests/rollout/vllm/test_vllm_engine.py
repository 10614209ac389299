"""VLLMEngine over the real vLLM: many requests, a full cache, publications, and the ends that only real processes have."""

import asyncio
import gc
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from blockbuster import blockbuster_ctx

from asyncrl.errors import ConfigError, EngineError, ModelError
from asyncrl.ports import GenerateRequest, Generation, RolloutEngine
from asyncrl.rollout.publication.publisher import Publisher
from asyncrl.rollout.publication.shelf import Shelf
from asyncrl.rollout.vllm.engine import VLLMEngine
from asyncrl.rollout.vllm.launch import launch
from asyncrl.rollout.vllm.processes import children
from asyncrl.rollout.vllm.settings import VLLMSettings
from asyncrl.world import RealWorld

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]

Kit = Any  # conftest.VLLMKit: test folders are no packages, so its type cannot be imported here
MakeRequest = Callable[..., GenerateRequest]
GenerateAll = Callable[[RolloutEngine, Sequence[GenerateRequest]], Awaitable[list[Generation]]]


@pytest_asyncio.fixture(loop_scope="session")
async def world() -> AsyncIterator[RealWorld]:
    async with RealWorld() as world:
        yield world


@pytest.fixture
def make_vllm(kit_model: str, world: RealWorld) -> Callable[..., VLLMEngine]:
    """make_vllm(**settings): an engine with a vLLM of its own."""

    def make(**settings: Any) -> VLLMEngine:
        plain = {"model": kit_model, "dtype": "float32", "max_num_seqs": 8, "context_len": 512}
        return VLLMEngine(
            VLLMSettings(**{**plain, **settings}),
            world=world,
            publisher=Publisher("shm", kit_model, Shelf(world=world)),
        )

    return make


@pytest.fixture
def kit_model(vllm_kit: Kit) -> str:
    return str(vllm_kit._shared.folder)


def prompts(number: int, longest: int) -> list[list[int]]:
    rng = random.Random(number)
    return [[rng.randrange(150) for _ in range(rng.randint(1, longest))] for _ in range(number)]


def check_log_probs(kit: Kit, request: GenerateRequest, generation: Generation) -> None:
    """Those of a plain forward with the weights of each token's version; a greedy row's at temperature 1."""
    ids, start = [*request.prompt_ids, *generation.token_ids], len(request.prompt_ids) - 1
    versions = generation.token_versions()
    rows = {version: kit.log_probs(version, ids, request.sampling.temperature or 1.0) for version in set(versions)}
    wanted = [float(rows[versions[k]][start + k, token]) for k, token in enumerate(generation.token_ids)]
    assert generation.log_probs == pytest.approx(wanted, abs=1e-4)


def have_ended(pids: Iterable[int], timeout_s: float = 60) -> bool:
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([fd], [], [], timeout_s)[0]:
                return False
        finally:
            os.close(fd)
    return True


# --- requests ---------------------------------------------------------------------------------------------------------------------


async def test_five_hundred_requests_at_once(vllm_kit: Kit, request_of: MakeRequest, generate_all: GenerateAll) -> None:
    """More prompt tokens than a step takes: vLLM's CPU build dies of a prompt that it cuts in two."""
    requests = [request_of(prompt, seed=k, max_tokens=1 + k % 9) for k, prompt in enumerate(prompts(500, 60))]
    async with vllm_kit.make(max_num_seqs=64) as engine:
        generations = await generate_all(engine, requests)
        assert engine.stats()["generated_tokens"] == sum(len(each.token_ids) for each in generations)
    for request, generation in zip(requests, generations, strict=True):
        assert len(generation.token_ids) == request.sampling.max_tokens
        check_log_probs(vllm_kit, request, generation)


async def test_greedy_and_random_rows_beside_filtered_ones_keep_their_own_log_probs(
    vllm_kit: Kit, request_of: MakeRequest, generate_all: GenerateAll
) -> None:
    kinds = [{"temperature": 0.0, "top_k": 3}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 1}, {"temperature": 1.3}]
    requests = [request_of(prompt, seed=k, max_tokens=20, **kinds[k % 4]) for k, prompt in enumerate(prompts(16, 20))]
    async with vllm_kit.make(max_num_seqs=16) as engine:
        generations = await generate_all(engine, requests)
    for k, (request, generation) in enumerate(zip(requests, generations, strict=True)):
        if k % 4 == 2:
            assert generation.log_probs == pytest.approx([0.0] * 20)
        else:
            check_log_probs(vllm_kit, request, generation)


async def test_a_publication_costs_a_request_none_of_its_random_numbers(vllm_kit: Kit, request_of: MakeRequest) -> None:
    """It is computed anew, and goes on where it was: under equal weights it samples what it would have sampled."""
    async with vllm_kit.make(context_len=512) as engine:
        alone = await engine.generate(request_of(seed=3, max_tokens=200))
        task = asyncio.create_task(engine.generate(request_of(seed=3, max_tokens=200)))
        await engine.generate(request_of(seed=4, max_tokens=5))
        await engine.publish(1, vllm_kit.snapshot(0))
        disturbed = await task
    assert disturbed.token_ids == alone.token_ids
    assert [span.version for span in disturbed.version_spans] == [0, 1]


async def test_a_session_finds_its_prefix_in_the_cache(vllm_kit: Kit, request_of: MakeRequest) -> None:
    prompt = prompts(1, 300)[0] * 300
    async with vllm_kit.make(context_len=512) as engine:
        await engine.generate(request_of(prompt[:300], max_tokens=2))
        assert engine.stats()["cached_prompt_tokens"] == 0
        await engine.generate(request_of(prompt[:310], max_tokens=2))
        assert engine.stats()["cached_prompt_tokens"] == 288
        assert engine.stats()["prompt_tokens"] == 610


# --- starting ---------------------------------------------------------------------------------------------------------------------


async def test_heads_that_the_cpu_build_lacks_are_refused_at_the_start(
    make_lm: Callable[..., Any], make_vllm: Callable[..., VLLMEngine], tmp_path: Path
) -> None:
    make_lm("qwen2", hidden_size=64, head_dim=16).save_pretrained(tmp_path)
    before = some_children()
    with pytest.raises(ModelError, match=r"attention heads of 16, and vLLM's CPU build serves 32, 64"):
        await make_vllm(model=str(tmp_path)).__aenter__()
    assert set(children(os.getpid())) == before


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"engine_args": {"max_num_batched": 1}}, ConfigError, r"no such argument; did you mean max_num_batched_tokens"),
        ({"context_len": 10**6}, ConfigError, r"vLLM refuses the model .*max_model_len"),
        ({"dtype": "float31"}, ConfigError, r"vLLM refuses the model .*dtype"),
    ],
)
async def test_settings_that_vllm_refuses_are_one_line(
    make_vllm: Callable[..., VLLMEngine], settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        await make_vllm(**settings).__aenter__()
    assert "\n" not in str(caught.value)


async def test_a_start_that_is_given_up_leaves_nothing(make_vllm: Callable[..., VLLMEngine], world: RealWorld) -> None:
    """No process, no thread at work, and nothing that vLLM has opened in this one."""
    before, contexts = some_children(), open_contexts()
    opening = asyncio.create_task(make_vllm().__aenter__())
    while not (started := set(children(os.getpid())) - before) and not opening.done():
        await asyncio.wait({opening}, timeout=0.05)
    opening.cancel()
    await asyncio.wait({opening})
    assert started
    assert have_ended(started)
    async with asyncio.timeout(60):
        while world.abandoned("engines") or open_contexts() > contexts:  # noqa: ASYNC110 (a thread, and the collector)
            await asyncio.sleep(0.05)


def open_contexts() -> int:
    """Of ZeroMQ; vLLM leaves them to the collector."""
    context = import_module("zmq").Context
    gc.collect()
    return sum(type(each) is context and not each.closed for each in gc.get_objects())


def some_children() -> set[int]:
    """Those that are there before anything is started; Python's own helper among them."""
    resource_tracker.ensure_running()
    return set(children(os.getpid()))


# --- ends -------------------------------------------------------------------------------------------------------------------------


async def test_a_full_cache_and_a_dead_worker(
    vllm_kit: Kit, make_vllm: Callable[..., VLLMEngine], request_of: MakeRequest, generate_all: GenerateAll
) -> None:
    """One vLLM with blocks for 1,024 tokens, opened where nothing may block the loop. Its requests wait for each other, are
    computed anew, and lose nothing; then its worker is killed, and it is closed."""
    requests = [request_of(prompt, seed=k, max_tokens=300) for k, prompt in enumerate(prompts(8, 60))]
    engine = make_vllm(kv_cache_memory_mib=1, engine_args={"max_num_batched_tokens": 600})
    with blockbuster_ctx("asyncrl"):
        async with engine:
            generations = await generate_all(engine, requests)
            assert engine.stats()["preemptions"] > 0
            again = await engine.generate(requests[5])
            tasks = [asyncio.create_task(engine.generate(request_of(seed=seed, max_tokens=400))) for seed in range(4)]
            await engine.generate(request_of(max_tokens=1))
            assert engine._client is not None
            core, worker = engine._client.processes
            os.kill(worker.pid, signal.SIGKILL)
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, EngineError)
                assert f"vLLM's worker 0 (pid {worker.pid})" in str(result)
    assert have_ended([core.pid, worker.pid])
    assert again.token_ids == generations[5].token_ids
    for request, generation in zip(requests, generations, strict=True):
        check_log_probs(vllm_kit, request, generation)


async def test_a_vllm_that_hangs_is_ended_all_the_same(
    vllm_kit: Kit, make_vllm: Callable[..., VLLMEngine], request_of: MakeRequest
) -> None:
    """Its worker, too, which its own EngineCore would end and cannot."""
    async with make_vllm() as engine:
        await engine.generate(request_of(max_tokens=1))
        assert engine._client is not None
        pids = [process.pid for process in engine._client.processes]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        task = asyncio.create_task(engine.generate(request_of(max_tokens=400)))
        await asyncio.wait({task}, timeout=0.5)
        assert not task.done()
    with pytest.raises(EngineError, match="closed"):
        await task
    assert have_ended(pids)


SERVE = """
import asyncio, os, signal, sys
from asyncrl.ports import GenerateRequest, SamplingParams
from asyncrl.rollout.publication.publisher import Publisher
from asyncrl.rollout.publication.shelf import Shelf
from asyncrl.rollout.vllm.engine import VLLMEngine
from asyncrl.rollout.vllm.settings import VLLMSettings
from asyncrl.world import RealWorld

async def main(model):
    interrupted = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
    settings = VLLMSettings(model=model, dtype="float32", max_num_seqs=4, context_len=64)
    async with RealWorld() as world:
        async with VLLMEngine(settings, world=world, publisher=Publisher("shm", model, Shelf(world=world))) as engine:
            print(*(process.pid for process in engine._client.processes), flush=True)
            await interrupted.wait()
            request = GenerateRequest(request_id="r", prompt_ids=[1, 2], sampling=SamplingParams(max_tokens=20), seed=0)
            print(len((await engine.generate(request)).token_ids), flush=True)
            await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
"""


async def test_ctrl_c_leaves_the_engine_and_kill_nine_takes_it(kit_model: str, tmp_path: Path, world: RealWorld) -> None:
    """As in a terminal: SIGINT reaches all processes of the group, and the run still needs its engine to end well."""
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    run = subprocess.Popen(  # noqa: ASYNC220 (takes no time)
        [sys.executable, str(script), kit_model], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert run.stdout is not None
        pids = [int(each) for each in (await world.offload(run.stdout.readline)).split()]
        assert len(pids) == 2
        os.killpg(run.pid, signal.SIGINT)
        assert await world.offload(run.stdout.readline) == "20\n"
    finally:
        run.kill()
        await world.offload(run.communicate)
    assert await world.offload(have_ended, pids)


async def test_the_settings_reach_a_launch_without_an_engine(kit_model: str, world: RealWorld) -> None:
    """A model that is none is refused before any process is started."""
    before = some_children()
    with pytest.raises(ConfigError, match="vLLM refuses the model '/nowhere'"):
        await launch(VLLMSettings(model="/nowhere", dtype="float32", max_num_seqs=1, context_len=64), world)
    assert set(children(os.getpid())) == before
