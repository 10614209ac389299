"""Which engines a configuration asks for: what a dry run says of them, and what is refused before anything is started."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from asyncrl.config import TrainRun, parse_run
from asyncrl.engines import make_engine, make_eval_engine, weights_of
from asyncrl.errors import ConfigError, EngineError
from asyncrl.ports import GenerateRequest, SamplingParams
from asyncrl.preflight import check_train, describe_batch
from asyncrl.rollout.opened_later import OpenedLater
from asyncrl.rollout.pool import EnginePool
from asyncrl.rollout.torch_engine import TorchEngine
from asyncrl.world import RealWorld

SERVERS = {"name": "openai", "openai": {"base_urls": ["http://localhost:8000", "http://localhost:8001"]}}


def run_with(path: str = "model", *, rollout: dict[str, Any], **sections: dict[str, Any]) -> TrainRun:
    tree = {"data": {"train_files": "rows.jsonl"}, "model": {"path": path}, "rollout": rollout}
    return parse_run(TrainRun, {**tree, **sections})


# --- what a dry run says --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rollout", "told"),
    [
        ({}, ["engine              torch: 1 engine in this process, 64 rows"]),
        ({"num_engines": 2}, ["engine              torch: 2 engines in this process, 64 rows each"]),
        (
            {"name": "vllm"},
            ["engine              vllm: 1 engine beside this process, 64 rows", "new weights         by shared memory"],
        ),
        (
            {
                "name": "vllm",
                "num_engines": 2,
                "weight_transfer": "nccl",
                "vllm": {"tensor_parallel_size": 2, "devices": ["0,1", "2,3"]},
            },
            [
                "engine              vllm: 2 engines of 2 devices (0,1; 2,3) beside this process, 64 rows each",
                "new weights         by NCCL",
            ],
        ),
        (
            SERVERS,
            [
                "engine              openai: 2 engines at http://localhost:8000, http://localhost:8001, 64 rows each",
                "new weights         by shared memory",
            ],
        ),
        (
            {"name": "openai", "openai": {"base_urls": "http://far:1", "weights_dir": "/shared"}},
            [
                "engine              openai: 1 engine at http://far:1, 64 rows",
                "new weights         by safetensors files in /shared",
            ],
        ),
    ],
    ids=["torch", "two of torch", "vllm", "two of vllm", "servers", "a server elsewhere"],
)
def test_a_dry_run_says_which_engines_there_are_and_how_weights_reach_them(rollout: dict[str, Any], told: list[str]) -> None:
    lines = describe_batch(run_with(rollout=rollout), num_rows=64).splitlines()
    assert [line.removeprefix("# ") for line in lines if line.startswith(("# engine ", "# new weights"))] == told


@pytest.mark.parametrize(
    ("rollout", "sizes"),
    [
        ({}, (1, 1, 1)),
        ({"num_engines": 3}, (3, 1, 3)),
        ({"name": "vllm", "num_engines": 2, "vllm": {"tensor_parallel_size": 4}}, (8, 4, 2)),
        (SERVERS, (2, 1, 2)),
    ],
)
def test_the_layout_of_the_engines_in_a_trace(rollout: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    topology = run_with(rollout=rollout).rollout.topology
    assert (topology.world, topology.tp, topology.dp) == sizes


# --- what is refused before anything is started ---------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}, "data_source": "s"}\n'
    )
    return str(path)


@pytest.fixture
def check(model_folder: Path, rows: str, tmp_path: Path) -> Any:
    def check(**rollout: Any) -> str:
        """The line of what is wrong."""
        trainer = {"default_local_dir": str(tmp_path / "runs"), "total_training_steps": 1}
        lengths: dict[str, Any] = {"max_prompt_length": 64, "max_response_length": 64, "train_files": rows}
        run = run_with(str(model_folder), rollout=rollout, trainer=trainer, data=lengths)
        with pytest.raises(ConfigError) as caught:
            check_train(run)
        assert not (tmp_path / "runs").exists()
        return str(caught.value)

    return check


def test_vllm_that_is_not_installed_says_how_to_install_it(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only the sending of weights is its work."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    how = (
        " needs vLLM, which is not installed: pip install 'asyncrl[vllm]' on a machine with a GPU, or "
        "make setup-vllm for its CPU build"
    )
    assert check(name="vllm") == f'rollout.name = "vllm"{how}'
    assert check(**SERVERS, weight_transfer="nccl") == f'rollout.weight_transfer = "nccl"{how}'


def test_an_argument_of_vllm_that_asyncrl_sets_is_refused_with_its_key(check: Any) -> None:
    assert check(name="vllm", vllm={"engine_args": {"max_model_len": 7}}) == (
        "rollout.vllm.engine_args.max_model_len = 7: asyncrl sets this argument of vLLM by itself; set rollout.max_model_len "
        "instead"
    )


def test_a_client_without_its_library_or_its_key_or_its_folder_is_refused(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keyed = {"base_urls": ["http://localhost:1"], "api_key_env": "NO_SUCH_KEY"}
    assert check(name="openai", openai=keyed) == (
        "rollout.openai.api_key_env = 'NO_SUCH_KEY': there is no such environment variable, or it is empty"
    )
    filed = {"base_urls": ["http://far:1"], "weights_dir": "/no/such/folder"}
    assert check(name="openai", openai=filed) == "rollout.openai.weights_dir = '/no/such/folder': no such folder"
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert check(**SERVERS) == ("rollout.name = \"openai\" needs aiohttp, which is not installed: pip install 'asyncrl[openai]'")


# --- engines in this process ----------------------------------------------------------------------------------------------------


REQUEST = GenerateRequest(request_id="r", prompt_ids=[5, 6, 7], sampling=SamplingParams(max_tokens=4), seed=1, session="s")
SHORT: dict[str, Any] = {"max_prompt_length": 16, "max_response_length": 16, "train_files": "rows.jsonl"}


def short_run(folder: Path, **rollout: Any) -> TrainRun:
    return run_with(str(folder), rollout=rollout, data=SHORT)


async def test_several_engines_in_this_process_are_a_pool_that_answers_as_one(
    model_folder: Path, quickstart_tokenizer: PreTrainedTokenizerFast
) -> None:
    decode = quickstart_tokenizer.decode
    async with RealWorld(run_seed=1) as world:
        one = await world.offload(make_engine, short_run(model_folder), world, decode)
        two = await world.offload(make_engine, short_run(model_folder, num_engines=2), world, decode)
        async with one as single, two as pool:
            assert isinstance(single, TorchEngine)
            assert isinstance(pool, EnginePool)
            assert pool.stats()["engines"] == 2
            assert pool.context_len == 32
            told, same = await asyncio.gather(single.generate(REQUEST), pool.generate(REQUEST))
            assert told.token_ids == same.token_ids


async def test_the_engine_of_an_evaluation_is_one_alone(model_folder: Path, quickstart_tokenizer: PreTrainedTokenizerFast) -> None:
    async with RealWorld(run_seed=1) as world:
        run = short_run(model_folder, num_engines=2)
        engine = await world.offload(make_eval_engine, run, world, quickstart_tokenizer.decode)
        async with engine as opened:
            assert isinstance(opened, TorchEngine)


async def test_adapters_of_layers_that_are_not_there_are_refused_before_any_engine_starts(model_folder: Path) -> None:
    run = run_with(
        str(model_folder),
        rollout={"name": "vllm"},
        model={"path": str(model_folder), "lora_rank": 2, "target_modules": ["no_such_layer"]},
    )
    async with RealWorld(run_seed=1) as world:
        with pytest.raises(ConfigError, match="no_such_layer"):
            await world.offload(make_engine, run, world, str)


def test_weights_of_a_folder_are_those_of_its_parameters(model_folder: Path) -> None:
    tensors = weights_of(run_with(str(model_folder), rollout={}).model).tensors
    assert "model.embed_tokens.weight" in tensors
    assert not any(tensor.requires_grad for tensor in tensors.values())


async def test_an_engine_that_is_opened_later_is_none_before(model_folder: Path) -> None:
    async with RealWorld(run_seed=1) as world:
        made: list[TorchEngine] = []

        def make() -> TorchEngine:
            engine = make_engine(short_run(model_folder), world, str)
            assert isinstance(engine, TorchEngine)
            made.append(engine)
            return engine

        engine = OpenedLater(make, context_len=32, world=world)
        assert (engine.version, engine.context_len, engine.beats, engine.stats()) == (0, 32, 0, {})
        assert "has not been started" in str(engine.failure)
        with pytest.raises(EngineError, match="has not been started"):
            await engine.generate(REQUEST)
        async with engine:
            assert engine.failure is None
            assert len((await engine.generate(REQUEST)).token_ids) == 4
            assert engine.beats > 0
            assert engine.stats()["generated_tokens"] == 4
        assert len(made) == 1
        assert "closed" in str(engine.failure)
