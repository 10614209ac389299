"""Replay: prompt groups from admission to a whole batch. Knows the TransferQueue's tags and nothing of models."""

from asyncrl.replay.admission import Admission, Found
from asyncrl.replay.buffer import ReplayBuffer
from asyncrl.replay.groups import PromptGroup, transition

__all__ = ["Admission", "Found", "ReplayBuffer", "PromptGroup", "transition"]
