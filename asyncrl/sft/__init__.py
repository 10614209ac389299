"""Supervised warm start: learn the assistant turns of conversations, as the very ids that a rollout would have.

    rows -> conversations -> ids and mask -> batches -> micro-batches -> AdamW -> <run folder>/hf

conversations   rows to ids and mask            warm_start   order of the batches, and a step of learning
run             the whole run: folder, metrics, stop, export
"""

from asyncrl.sft.conversations import encode_conversation
from asyncrl.sft.run import run_sft
from asyncrl.sft.warm_start import WarmStart

__all__ = ["run_sft", "WarmStart", "encode_conversation"]
