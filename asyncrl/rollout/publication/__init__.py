"""Publication: how weights get from the trainer into a running vLLM. See publisher.py."""

from asyncrl.rollout.publication.control import Control
from asyncrl.rollout.publication.publisher import Publisher
from asyncrl.rollout.publication.shelf import Shelf

__all__ = ["Control", "Publisher", "Shelf"]
