"""How far the actor's weights are from those of one rank, after ten AdamW steps on the same rows, in learning rates.

Each layout of ranks trains the same small models by the product's actor, in float32 and float64: data parallel, HSDP (copies of cut
weights), SP (sequence parallel), TP (tensor parallel). One rank is this process. Told of a layout is the worst weight of all models
as max |w - w of one rank| / lr, and how many are above the limit. To compare: `rounding` is one rank in float32 against the same in
float64.

Adam divides a gradient by its own size, so a weight whose first gradient is near 0 moves by what rounding has made of it: the worst
weights are those, and the more weights a model has, the nearer to 0 is its nearest. So in float32 the worst weight grows with the
model (hidden 16, 32, 64: about 1e-3, 3e-3, 5e-2), while all but a few in 100,000 stay. And a weight near 1 has steps of 6e-8 in
float32: with a learning rate below 1e-5 these alone are more than a hundredth of it.

    python benchmarks/rank_invariance.py [--models qwen2 ...] [--layouts tp-2 ...] [--hidden 32] [--json]
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncrl.cluster import Rank, RankGroup
from asyncrl.config import TrainRun, parse_run
from asyncrl.ports import Shards, Topology
from asyncrl.protocol.ragged import ragged
from asyncrl.training.actor import Actor
from asyncrl.training.mesh import full_copy, open_mesh

STEPS, NUM_ROWS, LR, VOCAB = 10, 16, 1e-3, 128
LIMITS = {"float32": 1e-2, "float64": 1e-6}
LAYOUTS = {
    "2-ranks": Topology(world=2),
    "4-ranks": Topology(world=4),
    "hsdp-2x2": Topology(world=4, fsdp_size=2),
    "sp-2": Topology(world=2, sp=2),
    "tp-2": Topology(world=2, tp=2),
    "sp-2-tp-2": Topology(world=4, sp=2, tp=2),
}
_TIMEOUT_S = 120.0

Weights = Mapping[str, torch.Tensor]
Model = tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, Any]]
MODELS: dict[str, Model] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2-untied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": False}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True, "head_dim": 16}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
}


class Trainee:
    """What a rank serves."""

    def train(self, run: TrainRun, topology: Topology) -> Weights:
        """The weights after STEPS updates, whole, in float64. Rank 0's are looked at."""
        mesh = open_mesh(topology)
        actor = Actor(run, mesh)
        for step in range(STEPS):
            rows = [str(row) for row in range(NUM_ROWS)]
            report = actor.update(_columns(step), rows, rows, shards=_shards(topology.dp))
            assert not report["actor/skipped_updates"]
        weights = {name: full_copy(tensor).double() for name, tensor in actor.learner.parameters.items()}
        return weights if mesh.rank == 0 else {}


def serve(_rank: Rank, _payload: object) -> Trainee:
    return Trainee()


def _shards(dp: int) -> Shards:
    """Every rank has each dp-th row, in one mini-batch."""
    return tuple((tuple(range(rank, NUM_ROWS, dp)),) for rank in range(dp)) if dp > 1 else ()


def _columns(step: int) -> TensorDict:
    """Rows of 8 to 32 prompt ids and 4 to 32 new ones, of which about a fifth is observation."""
    torch.manual_seed(step)
    lengths = [(int(torch.randint(8, 33, ())), int(torch.randint(4, 33, ()))) for _ in range(NUM_ROWS)]
    sequences = [torch.randint(VOCAB, (sum(pair),)) for pair in lengths]
    masks = [torch.rand(new) < 0.8 for _, new in lengths]
    columns = {
        "input_ids": sequences,
        "position_ids": [torch.arange(len(row)) for row in sequences],
        "response_mask": masks,
        "advantages": [torch.randn(()) * mask for mask in masks],
    }
    return TensorDict({name: ragged(rows) for name, rows in columns.items()}, batch_size=[NUM_ROWS])


def make_model(kind: str, hidden: int, folder: Path) -> Path:
    """A random model of two layers with 4 query heads a layer, 2 of keys, as the library makes it."""
    torch.manual_seed(0)
    config_type, model_type, options = MODELS[kind]
    sizes = {"vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    model: PreTrainedModel = model_type(config_type(**{**sizes, **heads, **options}))
    model.save_pretrained(folder / kind)
    return folder / kind


def make_run(model: Path, dtype: str, topology: Topology) -> TrainRun:
    cut = {
        "fsdp_size": topology.fsdp_size,
        "ulysses_sequence_parallel_size": topology.sp,
        "tensor_model_parallel_size": topology.tp,
    }
    return parse_run(
        TrainRun,
        {
            "data": {"train_files": ["-"], "train_batch_size": NUM_ROWS, "max_prompt_length": 32, "max_response_length": 32},
            "model": {"path": str(model), "dtype": dtype},
            "rollout": {"n": 1},
            "actor": {
                "ppo_max_token_len_per_gpu": 128,
                "optim": {"lr": LR},
                **({"fsdp_config": cut} if topology.world > 1 else {}),
            },
            "cluster": {"kind": "local", "num_ranks": topology.world} if topology.world > 1 else {},
            "trainer": {"total_training_steps": STEPS},
        },
    )


class Comparison:
    """The models' weights of one rank, and how far others are from them."""

    def __init__(self, models: Mapping[str, Path]) -> None:
        self._models = models
        self._alone = {
            (kind, dtype): Trainee().train(make_run(folder, dtype, Topology()), Topology())
            for kind, folder in models.items()
            for dtype in LIMITS
        }

    def rounding(self) -> "Distance":
        """Of one rank: float32 against float64."""
        return self._distance({kind: self._alone[kind, "float32"] for kind in self._models}, "float64", LIMITS["float32"])

    def measure(self, group: RankGroup, topology: Topology, dtype: str) -> "Distance":
        """Of the ranks of a group, cut that way."""
        found: dict[str, Weights] = {}
        for kind, folder in self._models.items():
            weights = group.call("train", make_run(folder, dtype, topology), topology)[0]
            assert isinstance(weights, dict)
            found[kind] = weights
        return self._distance(found, dtype, LIMITS[dtype])

    def _distance(self, found: Mapping[str, Weights], dtype: str, limit: float) -> "Distance":
        gaps: dict[str, torch.Tensor] = {}
        for kind, weights in found.items():
            alone = self._alone[kind, dtype]
            assert weights.keys() == alone.keys()
            gaps |= {f"{kind}: {name}": (weights[name] - alone[name]).abs().flatten() / LR for name in alone}
        every = torch.cat(list(gaps.values()))
        worst = max(gaps, key=lambda name: float(gaps[name].max()))
        return Distance(largest=float(every.max()), worst=worst, above=int((every > limit).sum()), of=len(every))


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """largest: of all weights, in learning rates; worst: which; above: weights above the limit, of so many."""

    largest: float
    worst: str
    above: int
    of: int


def measure(models: Sequence[str], layouts: Sequence[str], hidden: int, work: Path) -> dict[str, Any]:
    """Distance by layout and type; `ok`: all within LIMITS."""
    comparison = Comparison({kind: make_model(kind, hidden, work) for kind in models})
    found: dict[str, dict[str, Distance]] = {}
    print(f"\n{'':14s}{'float32':>10s}{'above':>7s}{'float64':>10s}  worst weight in float32")
    for world in sorted({LAYOUTS[name].world for name in layouts}):
        group = RankGroup(world, "rank_invariance:serve", timeout_s=_TIMEOUT_S)
        try:
            group.start(None)
            for name in (name for name in layouts if LAYOUTS[name].world == world):
                found[name] = {dtype: comparison.measure(group, LAYOUTS[name], dtype) for dtype in LIMITS}
                _print(name, found[name]["float32"], f"{found[name]['float64'].largest:.1e}")
        finally:
            group.close()
    rounding = comparison.rounding()
    _print("rounding", rounding, "")
    within = all(each[dtype].largest <= limit for each in found.values() for dtype, limit in LIMITS.items())
    distances = {name: {dtype: asdict(each) for dtype, each in both.items()} for name, both in found.items()}
    return {"distances": distances, "rounding": asdict(rounding), "limits": LIMITS, "weights": rounding.of, "ok": within}


def _print(name: str, in_float32: Distance, in_float64: str) -> None:
    print(f"{name:14s}{in_float32.largest:10.1e}{in_float32.above:7d}{in_float64:>10s}  {in_float32.worst}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--hidden", type=int, default=32, help="hidden size of the models")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))  # where the ranks find this file
    with tempfile.TemporaryDirectory() as work:
        result = measure(args.models, args.layouts, args.hidden, Path(work))
    print(f"max |w - w of one rank| / lr after {STEPS} steps, {result['weights']:,} weights; ", end="")
    print(f"all within {LIMITS}: {'yes' if result['ok'] else 'NO'}")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
