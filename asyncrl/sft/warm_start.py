"""The learning of a warm start: which rows come when, and one optimizer step on a batch.

conversations -> [warm_start] -> run. Invariant: the loss is the mean over the assistant tokens of a whole batch, however the batch
is split into micro-batches.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from asyncrl.agents.chat_template import load_chat_template
from asyncrl.config import SFTConfig, SFTRun
from asyncrl.sft.conversations import Conversation, load_stages
from asyncrl.tools import load_tools
from asyncrl.training.export import export_policy
from asyncrl.training.learner import Learner
from asyncrl.training.mesh import open_mesh
from asyncrl.training.microbatch import Budget, pack_micro_batches
from asyncrl.training.model import build_policy
from asyncrl.training.token_batch import token_batch
from asyncrl.world import derive_seed


def plan_stages(sft: SFTConfig) -> list[int]:
    """Steps of each stage; they add up to `sft.total_steps`."""
    count = max(len(sft.stages), 1)
    shares = sft.stage_shares or [1 / count] * count
    ends = [round(sft.total_steps * sum(shares[: stage + 1])) for stage in range(count)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def batches_of(num_rows: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Row numbers of each batch, for ever: every epoch in a new order, and a batch may span two epochs."""
    order = _rows_for_ever(num_rows, seed)
    while True:
        yield [next(order) for _ in range(batch_size)]


def _rows_for_ever(num_rows: int, seed: int) -> Iterator[int]:
    source = random.Random(seed)
    while True:
        yield from source.sample(range(num_rows), num_rows)


class WarmStart:
    """Model, rows and order of one run. Built and called in one thread; `steps` is the run."""

    def __init__(self, run: SFTRun) -> None:
        """Reads rows and model. Raises UserError for what is wrong with them."""
        torch.set_num_threads(run.trainer.num_threads)
        torch.manual_seed(derive_seed(run.trainer.seed, "sft"))
        self._run = run
        schemas = [tool.schema for tool in load_tools(run.agent.tools).values()]
        self._stages = load_stages(run, load_chat_template(run.model, schemas))
        mesh = open_mesh()
        self._learner = Learner(build_policy(run.model, mesh), mesh, run.sft.optim, total_updates=run.sft.total_steps)
        self._batches = self._all_batches()

    def _all_batches(self) -> Iterator[tuple[int, list[Conversation]]]:
        for stage, (rows, steps) in enumerate(zip(self._stages, plan_stages(self._run.sft), strict=True)):
            order = batches_of(len(rows), self._run.sft.batch_size, derive_seed(self._run.trainer.seed, "sft", stage))
            for _ in range(steps):
                yield stage, [rows[number] for number in next(order)]

    def step(self) -> dict[str, float]:
        """One optimizer step on the next batch; its metrics."""
        stage, batch = next(self._batches)
        num_tokens = sum(int(row.mask.sum()) for row in batch)
        lengths = [len(row.input_ids) for row in batch]
        loss = 0.0
        budget = Budget(max_tokens=self._run.sft.max_token_len_per_gpu, is_hard=False)
        for numbers in pack_micro_batches(lengths, budget):
            loss += self._accumulate([batch[number] for number in numbers], num_tokens)
        report = self._learner.step(lambda: f"stage {stage}, {len(batch)} conversations")
        return {
            "sft/loss": loss,
            "sft/stage": float(stage),
            "sft/lr": report.lr,
            "sft/grad_norm": report.grad_norm,
            "sft/num_tokens": float(sum(lengths)),
            "sft/num_learned_tokens": float(num_tokens),
        }

    def _accumulate(self, rows: Sequence[Conversation], num_tokens: int) -> float:
        """Gradient of one micro-batch's share of the batch's mean."""
        micro = token_batch([row.input_ids for row in rows], [row.mask for row in rows])
        log_probs_n, _ = self._learner.module(micro)
        loss = -log_probs_n.sum() / num_tokens
        self._learner.backward(loss)
        return float(loss.detach())

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face directory."""
        export_policy(self._learner, folder, self._run.model)
