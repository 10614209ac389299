"""What a vLLM is started with: our settings, and the arguments of AsyncEngineArgs that they become. Imports no vllm by itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from asyncrl.config.rollout import Transfer
from asyncrl.errors import ConfigError
from asyncrl.ports import Json
from asyncrl.wording import nearest, shown

CPU_KV_CACHE_MIB = 256
"""Without a size vLLM takes a share of the whole memory of the machine."""
CPU_BLOCK_SIZE = 32
"""Tokens; the CPU's attention takes multiples of it. Small blocks share more of a prefix."""
CPU_BATCHED_TOKENS = 2048

OURS: Mapping[str, str] = {
    "model": "model.path",
    "dtype": "model.dtype",
    "seed": "trainer.seed",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_model_len": "rollout.max_model_len",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel_size",
    "device_ids": "rollout.vllm.devices",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.vllm.kv_cache_memory_mib",
    "enforce_eager": "rollout.vllm.enforce_eager",
    "weight_transfer_config": "rollout.weight_transfer",
    "data_parallel_size": "rollout.num_engines",
    "tokenizer": "",
    "skip_tokenizer_init": "",
    "generation_config": "",
    "logprobs_mode": "",
    "worker_extension_cls": "",
    "additional_config": "",
    "disable_log_stats": "",
    "enable_log_requests": "",
    "stream_interval": "",
}
"""Arguments that are not free, and the key to set instead, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMSettings:
    """Of one engine."""

    model: str
    """Folder of the model."""
    dtype: str
    """"float32", "bfloat16", ..."""
    max_num_seqs: int
    """Rows that decode together."""
    context_len: int
    """Tokens of prompt plus answer."""
    num_threads: int = 1
    """Of each worker, for its matrix products on a CPU."""
    tensor_parallel_size: int = 1
    devices: str = ""
    """GPUs, such as "0" or "2,3"; empty: all that are visible."""
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_mib: int = 0
    """Of each worker. 0: on a GPU what gpu_memory_utilization leaves, on a CPU 256."""
    enforce_eager: bool = False
    seed: int = 0
    weight_transfer: Transfer = "shm"
    engine_args: Mapping[str, Json] = field(default_factory=dict)
    """Further arguments of AsyncEngineArgs."""


def engine_args(settings: VLLMSettings, *, is_cpu: bool | None = None) -> dict[str, object]:
    """Arguments for AsyncEngineArgs. is_cpu: does this vLLM compute on the CPU? None: it is asked, and must be installed.

    Raises ConfigError for a free argument that is ours, or that vLLM does not have (told only when vLLM is asked).
    """
    free = dict(settings.engine_args)
    check_free_args(free, known=None if is_cpu is not None else _known_args())
    is_cpu = _is_cpu() if is_cpu is None else is_cpu
    if is_cpu and free.get("enable_chunked_prefill"):
        raise ConfigError(
            "rollout.vllm.engine_args.enable_chunked_prefill = true: vLLM's CPU build dies of a seeded request cut in two"
        )
    if is_cpu and settings.weight_transfer == "nccl":
        raise ConfigError('rollout.weight_transfer = "nccl" needs GPUs, and this vLLM is its CPU build; set "shm" or "directory"')
    if is_cpu and settings.devices:
        raise ConfigError(f"rollout.vllm.devices: {settings.devices!r} are GPUs, and this vLLM is its CPU build; leave the key out")
    of_platform = _cpu_args(settings) if is_cpu else _gpu_args(settings)
    return {**of_platform, **free, **_our_args(settings)}


def check_free_args(free: Mapping[str, Json], *, known: frozenset[str] | None = None) -> None:
    """Raises ConfigError for the first that is refused. known: all arguments that vLLM has; None: not asked."""
    for name in free:
        where = f"rollout.vllm.engine_args.{name}"
        if name in OURS:
            instead = f"set {OURS[name]} instead" if OURS[name] else "it must be as it is"
            raise ConfigError(f"{where} = {shown(free[name])}: asyncrl sets this argument of vLLM by itself; {instead}")
        if known is not None and name not in known:
            raise ConfigError(f"{where}: this vLLM has no such argument{nearest(name, known)}")


def _our_args(settings: VLLMSettings) -> dict[str, object]:
    """Log-probs are those of the distribution sampled from; nothing is sampled by a file of the model; ids travel, never text."""
    transfer = {"shm": "asyncrl_shm", "nccl": "nccl", "directory": "asyncrl_shm"}[settings.weight_transfer]
    return {
        "model": settings.model,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_num_seqs": settings.max_num_seqs,
        "max_model_len": settings.context_len,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "asyncrl.rollout.vllm.worker.WorkerExtension",
        "weight_transfer_config": {"backend": transfer},
        "disable_log_stats": True,
    }


def _cpu_args(settings: VLLMSettings) -> dict[str, object]:
    """A prompt is never cut into chunks: vLLM's sampler takes back the draw of an unfinished one from the row's generator, which a
    CPU generator cannot do, and the engine would die of it (0.32)."""
    return {
        "enforce_eager": True,
        "block_size": CPU_BLOCK_SIZE,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(settings.context_len, settings.max_num_seqs, CPU_BATCHED_TOKENS),
        "kv_cache_memory_bytes": (settings.kv_cache_memory_mib or CPU_KV_CACHE_MIB) << 20,
        "use_tqdm_on_load": False,
    }


def _gpu_args(settings: VLLMSettings) -> dict[str, object]:
    """Devices are named to vLLM: a CUDA_VISIBLE_DEVICES would be the trainer's as well while the engine starts."""
    args: dict[str, object] = {
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "use_tqdm_on_load": False,
    }
    if settings.kv_cache_memory_mib:
        args["kv_cache_memory_bytes"] = settings.kv_cache_memory_mib << 20
    if settings.devices:
        args["device_ids"] = [_device(part.strip()) for part in settings.devices.split(",") if part.strip()]
    return args


def _device(name: str) -> int | str:
    """A number, or the long name of a GPU or a part of one."""
    return int(name) if name.isdigit() else name


def _known_args() -> frozenset[str]:
    from vllm import AsyncEngineArgs

    return frozenset(each.name for each in fields(AsyncEngineArgs) if not each.name.startswith("_"))


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
