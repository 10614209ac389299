"""What runs in vLLM's worker processes: the end of the shared-memory transfer, and the head that vLLM's CPU build forgets.

Publisher -> Control -> vLLM -> [WorkerExtension, ShmTransfer] -> the model. vLLM loads this module in every worker, by its argument
`worker_extension_cls`, before the model; so `asyncrl_shm` is known when a worker looks its transfer engine up.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncrl.rollout.publication.placed import Where, opened

BACKEND = "asyncrl_shm"


@dataclass
class ShmInit(WeightTransferInitInfo):  # type: ignore[misc] # vllm has no types where mypy runs
    """Nothing is agreed on beforehand."""


@dataclass
class ShmUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """where: the fields of a `Where`."""

    where: dict[str, Any]


class ShmTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Weights out of memory that another process of this machine holds."""

    init_info_cls = ShmInit
    update_info_cls = ShmUpdate

    def init_transfer_engine(self, init_info: ShmInit) -> None:
        pass

    def start_weight_update(self) -> None:
        # The layers of the CPU build have packed their weights and thrown them away: plain loading finds no room.
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base does, but for its synchronization, which a machine without an accelerator refuses."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ShmUpdate) -> None:
        # A layer keeps the tensors until all of its own are there: the mapping lives as long as they do.
        self.model.load_weights(iter(opened(Where(**update_info.where)).items()))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        mend_tied_heads(self.model)

    def shutdown(self) -> None:
        pass


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, ShmTransfer)


def mend_tied_heads(model: torch.nn.Module) -> None:
    """Pack anew the heads that are embeddings too.

    The CPU build multiplies by a packed copy of the head. A reload packs the weights of a layer that it loads; a tied head loads
    none, so it would go on with the old copy, and say so in its log alone.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear") and module.weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class WorkerExtension:
    """Methods that vLLM adds to its workers; `collective_rpc` calls them by name."""

    model_runner: Any
    _weight_update_active: bool

    def asyncrl_version(self) -> dict[str, str | int]:
        """That this extension is there, in each worker, how many token ids its model has, and whether new weights are under way."""
        vocab_size = self.model_runner.model_config.get_vocab_size()
        return {"transfer": BACKEND, "vocab_size": vocab_size, "is_updating": self._weight_update_active}

    def asyncrl_mend_tied_head(self) -> None:
        """After weights came in by another way than `asyncrl_shm`, which does it by itself."""
        mend_tied_heads(self.model_runner.get_model())
