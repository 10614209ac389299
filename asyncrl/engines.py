"""The engines of a run, made from its configuration: one in this process, or several beside it and elsewhere under one pool.

config -> [engines] -> rollout (torch_engine, vllm, openai; pool) -> assembly

None is started here: that is done by who opens them. vLLM and aiohttp are imported only where their engine is chosen.
"""

import functools
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from transformers import AutoConfig

from asyncrl.config import ModelConfig, TrainRun
from asyncrl.errors import ConfigError
from asyncrl.ports import Decode, RolloutEngine, World
from asyncrl.rollout.opened_later import OpenedLater
from asyncrl.rollout.pool import EnginePool, limits_of
from asyncrl.rollout.publication.publisher import Publisher
from asyncrl.rollout.publication.shelf import Shelf
from asyncrl.rollout.torch_engine import TorchEngine
from asyncrl.training.lora import targets_of
from asyncrl.training.model import load_model
from asyncrl.training.publication import Snapshot

log = logging.getLogger(__name__)

Make = Callable[[], RolloutEngine]
Opener = AbstractAsyncContextManager[RolloutEngine]


def make_engine(run: TrainRun, world: World, decode: Decode) -> Opener:
    """The engine of a run, to be opened once. Blocking: reads the model where the engine is in this process.

    Raises UserError when the model cannot be used.
    """
    if not run.rollout.has_pool:
        return _torch_engine(run, decode)
    if run.model.lora_rank:
        targets_of(load_model(run.model), run.model.target_modules)  # is each of them there? asked before there is a folder
    return _pool_of(run, world, decode)


def make_eval_engine(run: TrainRun, world: World, decode: Decode) -> Opener:
    """A second engine of the same model, at version 0, for an evaluation beside training. Blocking as `make_engine`.

    Of vLLM it is one more on the devices of the first, whose memory they share.
    """
    return _torch_engine(run, decode) if run.rollout.name == "torch" else _pool_of(run, world, decode, count=1)


@asynccontextmanager
async def _pool_of(run: TrainRun, world: World, decode: Decode, *, count: int | None = None) -> AsyncIterator[RolloutEngine]:
    """The first `count` engines (None: all), and one copy of each version's weights for all of them."""
    folder = run.rollout.openai.weights_dir
    shelf = Shelf(world=world, folder=Path(folder) if folder else None)
    try:
        makers = (await world.offload(_makers, run, world, decode, shelf))[:count]
        log.info("opening %d engine%s of rollout.name = %r", len(makers), "s"[: len(makers) - 1], run.rollout.name)
        async with EnginePool(makers, limits=limits_of(run.rollout)) as pool:
            yield pool
    finally:
        await shelf.close()


def weights_of(model: ModelConfig) -> Snapshot:
    """Those of its folder, for engines that do not read them there. Blocking. Raises ModelError."""
    return Snapshot(version=0, tensors={name: tensor.detach() for name, tensor in load_model(model).named_parameters()})


def _makers(run: TrainRun, world: World, decode: Decode, shelf: Shelf) -> Sequence[Make]:
    """One an engine: each call gives a new one, on its own devices or of its own server. Blocking."""
    if run.rollout.name == "vllm":
        return _vllm_makers(run, world, decode, shelf)
    if run.rollout.name == "openai":
        return _openai_makers(run, world, decode, shelf)
    make = functools.partial(_torch_engine, run, decode)
    return [lambda: OpenedLater(make, context_len=run.max_model_len, world=world)] * run.rollout.num_engines


def _torch_engine(run: TrainRun, decode: Decode) -> TorchEngine:
    """With its own copy of the model. Blocking."""
    model = load_model(run.model)
    if run.model.lora_rank:
        targets_of(model, run.model.target_modules)
    return TorchEngine(
        model,
        max_num_seqs=run.rollout.max_num_seqs,
        context_len=run.max_model_len,
        deterministic=run.rollout.deterministic,
        decode=decode,
    )


def _vllm_makers(run: TrainRun, world: World, decode: Decode, shelf: Shelf) -> list[Make]:
    from asyncrl.rollout.vllm.engine import VLLMEngine
    from asyncrl.rollout.vllm.settings import VLLMSettings

    rollout, vllm = run.rollout, run.rollout.vllm

    def settings(number: int) -> VLLMSettings:
        return VLLMSettings(
            model=run.model.path,
            dtype=run.model.dtype,
            max_num_seqs=rollout.max_num_seqs,
            context_len=run.max_model_len,
            num_threads=run.trainer.num_threads,
            tensor_parallel_size=vllm.tensor_parallel_size,
            devices=vllm.devices[number] if vllm.devices else "",
            gpu_memory_utilization=vllm.gpu_memory_utilization,
            kv_cache_memory_mib=vllm.kv_cache_memory_mib,
            enforce_eager=vllm.enforce_eager,
            seed=run.trainer.seed,
            weight_transfer=rollout.transfer,
            engine_args=vllm.engine_args,
        )

    def make(number: int) -> RolloutEngine:
        publisher = Publisher(rollout.transfer, run.model.path, shelf)
        return VLLMEngine(settings(number), world=world, decode=decode, publisher=publisher)

    return [functools.partial(make, number) for number in range(rollout.num_engines)]


def _openai_makers(run: TrainRun, world: World, decode: Decode, shelf: Shelf) -> list[Make]:
    from asyncrl.rollout.openai.engine import OpenAIEngine
    from asyncrl.rollout.openai.settings import ServerSettings

    rollout, openai = run.rollout, run.rollout.openai
    vocab_size = AutoConfig.from_pretrained(run.model.path, local_files_only=True).get_text_config().vocab_size
    addresses = {base_url: _own_address(base_url) for base_url in openai.base_urls}

    def make(base_url: str) -> RolloutEngine:
        server = ServerSettings(
            base_url=base_url,
            model=openai.model,
            api_key_env=openai.api_key_env,
            max_num_seqs=rollout.max_num_seqs,
            context_len=run.max_model_len,
            vocab_size=vocab_size,
            control_timeout_s=rollout.publish_timeout_s,
        )
        publisher = Publisher(rollout.transfer, run.model.path, shelf, address=addresses[base_url])
        return OpenAIEngine(server, world=world, decode=decode, publisher=publisher)

    return [functools.partial(make, base_url) for base_url in openai.base_urls]


def _own_address(base_url: str) -> str:
    """Of this machine, as the server reaches it. Sends nothing. Raises ConfigError for a name that nobody knows."""
    parts = urlsplit(base_url)
    try:
        family, kind, _, _, place = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"rollout.openai.base_urls: {base_url} cannot be reached: {error}") from error
