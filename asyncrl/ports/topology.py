"""How the processes that hold one model are cut, and what follows from it: plain arithmetic, without torch.

config -> [Topology] -> mesh, balance of a batch, trace

The actor's and the rollout's are two objects; neither follows from the other.
"""

from dataclasses import dataclass
from typing import Literal

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """world: processes; tp: tensor, pp: pipeline, cp: context, sp: sequence parallel; fsdp_size: ranks among which each weight is
    cut, further ones hold copies (0: all that could).

    Raises ConfigError, with the arithmetic, for sizes that do not divide. Of `fsdp`, sequence parallel ranks are ranks of their own
    and also hold their cut of the weights; of `megatron` the tensor parallel ranks share the sequence, and sp takes none.
    """

    world: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    sp: int = 1
    dynamic_cp: bool = False
    """Megatron: every micro-batch chooses over how many ranks its sequences go, so all ranks share one batch."""
    fsdp_size: int = 0
    backend: Literal["fsdp", "megatron"] = "fsdp"

    def __post_init__(self) -> None:
        for name in ("world", "tp", "pp", "cp", "sp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: a topology has at least 1")
        if self.backend == "fsdp":
            self._check_fsdp()
        elif self.sp not in (1, self.tp):
            raise ConfigError(f"sp = {self.sp}: Megatron's sequence parallel ranks are its tensor parallel ones, tp = {self.tp}")
        elif self.fsdp_size:
            raise ConfigError(f"fsdp_size = {self.fsdp_size}: weights of backend = 'megatron' are not cut that way; leave it 0")
        _divide("world", self.world, self._model_sizes)

    def _check_fsdp(self) -> None:
        if (self.pp, self.cp, self.dynamic_cp) != (1, 1, False):
            raise ConfigError(
                f"pp = {self.pp}, cp = {self.cp}, dynamic_cp = {self.dynamic_cp}: backend = 'fsdp' has neither pipeline nor "
                "context parallel; use tp and sp"
            )
        if self.fsdp_size < 0:
            raise ConfigError(f"fsdp_size = {self.fsdp_size}: give 0 for all ranks, or a number of them")
        _divide("world", self.world, {"tp": self.tp})
        if self.fsdp_size:
            _divide("world / tp", self.world // self.tp, {"fsdp_size": self.fsdp_size})

    @property
    def _model_sizes(self) -> dict[str, int]:
        """The sizes whose product is the ranks that share one row of a batch."""
        if self.backend == "fsdp":
            return {"tp": self.tp, "sp": self.sp}
        return {"tp": self.tp, "pp": self.pp, "cp": self.cp}

    @property
    def dp(self) -> int:
        """Logical data-parallel size: into so many parts a batch is cut."""
        return 1 if self.dynamic_cp else self.world // _product(self._model_sizes)

    @property
    def shards(self) -> int:
        """Ranks among which each weight is cut (besides tp)."""
        return self.fsdp_size or self.world // self.tp

    @property
    def replicas(self) -> int:
        """Copies of the cut weights, whose gradients are summed as in DDP. More than 1: HSDP."""
        return self.world // self.tp // self.shards if self.backend == "fsdp" else self.dp

    def describe(self) -> str:
        """One line: what the ranks are, and how the data-parallel size follows."""
        sizes = self._model_sizes
        names, numbers = " x ".join(sizes), " x ".join(map(str, sizes.values()))
        if self.dynamic_cp:
            return f"world {self.world}: dynamic context parallel, so dp = 1"
        return f"world {self.world}: dp = world / ({names}) = {self.world} / ({numbers}) = {self.dp}"


def _product(sizes: dict[str, int]) -> int:
    product = 1
    for size in sizes.values():
        product *= size
    return product


def _divide(name: str, whole: int, sizes: dict[str, int]) -> None:
    by = _product(sizes)
    if whole % by:
        names, numbers = " x ".join(sizes), " x ".join(map(str, sizes.values()))
        product = f" = {numbers} = {by}" if len(sizes) > 1 else f" = {by}"
        raise ConfigError(f"{name} = {whole} is not a multiple of {names}{product}: {whole} / {by} = {whole / by:.3g}")
