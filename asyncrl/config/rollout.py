"""The sections of [rollout]: which engine generates, how many of them, and how new weights reach them.

`check_rollout` says what does not go together; layouts and limits that follow from the keys are properties.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from asyncrl.config.addresses import ServerUrl, Variable, is_this_machine
from asyncrl.config.sections import Count, Names, Positive, Seconds, Section, as_list
from asyncrl.errors import ConfigError
from asyncrl.ports import Json, Topology

if TYPE_CHECKING:
    from asyncrl.config.runs import TrainRun

Transfer = Literal["shm", "nccl", "directory"]


COLDEST, HOTTEST = 0.01, 2.0
"""Temperatures of vLLM: it samples at the first one instead of a lower one, and refuses what is above the second."""


class VLLMConfig(Section):
    """Engines of `rollout.name = "vllm"`."""

    tensor_parallel_size: Positive = 1
    """Devices that share one engine's model."""
    devices: Names = []
    """Devices of each engine, one entry an engine: "0", or "2,3" with tensor_parallel_size = 2. Empty: all that are visible."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that an engine takes; less where the trainer is on the same one."""
    kv_cache_memory_mib: Count = 0
    """MiB of the KV cache of each device. 0: on a GPU what gpu_memory_utilization leaves, on a CPU 256."""
    enforce_eager: bool = False
    """Neither compile nor capture graphs: starts faster, runs slower."""
    engine_args: dict[str, Json] = {}
    """Further arguments of vLLM's AsyncEngineArgs, such as quantization = "fp8"."""


class OpenAIConfig(Section):
    """Engines of `rollout.name = "openai"`: servers that take and return token ids over HTTP."""

    base_urls: Annotated[list[ServerUrl], BeforeValidator(as_list)] = []
    """Address of each server, such as "http://10.0.0.7:8000"; one entry an engine."""
    model: str = ""
    """Name under which the servers know the model. Empty: the only one that they have."""
    api_key_env: Variable = ""
    """Name of the environment variable with the key that the servers ask for. Empty: none is sent."""
    weights_dir: str = ""
    """Folder that the servers reach under the same path, for weight_transfer = "directory"; of one run at a time."""


class RolloutConfig(Section):
    """How trajectories are generated."""

    name: Literal["torch", "vllm", "openai"] = "torch"
    """Engine: `torch`, embedded in this process; `vllm`, beside it on this machine; `openai`, servers behind HTTP."""
    num_engines: Positive = 1
    """Engines that share the sessions."""
    n: Positive = 8
    """Sessions a prompt (the group's size)."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature during training."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling. 1: off."""
    top_k: Count = 0
    """Sample among the k likeliest tokens. 0: off."""
    max_num_seqs: Positive = 64
    """Rows that decode together in an engine (slots of its cache)."""
    max_model_len: Count = 0
    """Tokens of prompt plus response that a slot holds. 0: max_prompt_length + max_response_length."""
    deterministic: bool = False
    """Make a session's tokens independent of its neighbours: full-width decode steps, one prompt a prefill. Costs speed."""
    request_timeout_s: Seconds = 600.0
    """Seconds without a step of the engine after which a generate call fails its session. While it works, only agent.timeout_s."""
    publish_timeout_s: Seconds = 60.0
    """Seconds for the engine to take new weights. With in_flight_updates = false also the longest wait for calls in flight."""
    in_flight_updates: bool = True
    """New weights reach running generate calls at the next token. False: they wait for the calls, and new calls wait for them."""
    weight_transfer: Literal["auto", "shm", "nccl", "directory"] = "auto"
    """How weights travel: shared memory of this machine, NCCL, or safetensors files. auto: shm, or files to another machine."""
    start_timeout_s: Seconds = 600.0
    """Seconds that an engine may take to start, and requests wait for one that is brought back."""
    slow_after_s: Seconds = 30.0
    """Seconds without a step after which an engine gets no new requests; at half of request_timeout_s it is started anew."""
    max_restarts: Count = 3
    """Times in a row that an engine is brought back without an answer of it in between, before it is given up."""
    vllm: VLLMConfig = VLLMConfig()
    """Of `vllm`."""
    openai: OpenAIConfig = OpenAIConfig()
    """Of `openai`."""

    @property
    def has_pool(self) -> bool:
        """Is there somebody who watches the engines and brings them back?"""
        return self.name != "torch" or self.num_engines > 1

    @property
    def reads_model(self) -> bool:
        """Does an engine start with the weights of model.path? A server has whatever somebody gave it before."""
        return self.name != "openai"

    @property
    def count(self) -> int:
        """Engines."""
        return len(self.openai.base_urls) if self.name == "openai" else self.num_engines

    @property
    def topology(self) -> Topology:
        """How the engines' processes are cut; of servers only their number is known."""
        size = self.vllm.tensor_parallel_size if self.name == "vllm" else 1
        return Topology(world=self.count * size, tp=size)

    @property
    def hung_after_s(self) -> float:
        """Seconds without a step after which an engine is started anew: before its requests are failed for it."""
        return self.request_timeout_s / 2

    @property
    def transfer(self) -> Transfer:
        """`weight_transfer`, with `auto` resolved."""
        if self.weight_transfer != "auto":
            return self.weight_transfer
        return "directory" if self.name == "openai" and not all(map(is_this_machine, self.openai.base_urls)) else "shm"


def check_rollout(run: "TrainRun") -> None:
    """Raises ConfigError for what the engine cannot do, and for a layout that does not add up."""
    if run.rollout.has_pool:
        _check_watch(run.rollout)
    if run.rollout.name != "torch":
        _check_abilities(run)
    if run.rollout.name == "vllm":
        _check_devices(run.rollout.vllm, run.rollout.num_engines)
    if run.rollout.name == "openai":
        _check_servers(run)


def _check_watch(rollout: RolloutConfig) -> None:
    if rollout.slow_after_s >= rollout.hung_after_s:
        raise ConfigError(
            f"rollout.slow_after_s = {rollout.slow_after_s:g} is not less than half of rollout.request_timeout_s = "
            f"{rollout.request_timeout_s:g}, at which an engine is started anew"
        )


def _check_abilities(run: "TrainRun") -> None:
    name = f'rollout.name = "{run.rollout.name}"'
    if run.rollout.deterministic:
        raise ConfigError(f'{name} with rollout.deterministic = true: only the engine "torch" makes rows independent of each other')
    if run.model.lora_rank and run.model.lora_publish == "adapter":
        raise ConfigError(f'{name} with model.lora_publish = "adapter": it takes whole weights; set lora_publish = "merged"')
    if run.model.dtype == "float64":
        raise ConfigError(f'{name} with model.dtype = "float64": it computes in float32 or bfloat16')
    temperatures = {"rollout.temperature": run.rollout.temperature, "eval.temperature": run.eval.temperature}
    for key, temperature in temperatures.items():
        if not COLDEST <= temperature <= HOTTEST:
            raise ConfigError(
                f"{name} with {key} = {temperature:g}: vLLM samples at temperatures of {COLDEST:g} to {HOTTEST:g} alone"
            )


def _check_devices(vllm: VLLMConfig, num_engines: int) -> None:
    if vllm.devices and len(vllm.devices) != num_engines:
        raise ConfigError(
            f"rollout.vllm.devices = {vllm.devices} has {len(vllm.devices)} entries, and rollout.num_engines is {num_engines}: "
            "give one entry an engine"
        )
    for entry in vllm.devices:
        each = [part for part in entry.split(",") if part.strip()]
        if len(each) != vllm.tensor_parallel_size:
            raise ConfigError(
                f"rollout.vllm.devices: {entry!r} names {len(each)} devices, and rollout.vllm.tensor_parallel_size is "
                f"{vllm.tensor_parallel_size}"
            )


def _check_servers(run: "TrainRun") -> None:
    rollout, urls = run.rollout, run.rollout.openai.base_urls
    if not urls:
        raise ConfigError('rollout.name = "openai" needs rollout.openai.base_urls, such as ["http://localhost:8000"]')
    if len(set(urls)) < len(urls):
        raise ConfigError(f"rollout.openai.base_urls = {urls} names a server twice")
    if run.eval.where == "snapshot" and run.data.val_files:
        raise ConfigError(
            'eval.where = "snapshot" needs a second engine, and rollout.name = "openai" starts none; set eval.where = "between"'
        )
    if rollout.transfer == "directory" and not rollout.openai.weights_dir:
        raise ConfigError(
            'rollout.weight_transfer = "directory" to servers needs rollout.openai.weights_dir: a folder that they reach under the '
            "same path"
        )
    strange = [url for url in urls if not is_this_machine(url)]
    if rollout.transfer == "shm" and strange:
        raise ConfigError(f'rollout.weight_transfer = "shm" does not reach {strange[0]}, which is another machine; use "directory"')
