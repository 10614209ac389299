"""What the ranks of `run_on_ranks` serve: one function of a test's file."""

import importlib.util
import sys

from asyncrl.cluster import Rank


class Runner:
    def __init__(self, rank: Rank, file: str, name: str) -> None:
        spec = importlib.util.spec_from_file_location("the_test", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["the_test"] = module
        spec.loader.exec_module(module)
        self.rank = rank
        self.function = getattr(module, name)

    def run(self, payload: object) -> object:
        return self.function(self.rank, payload)


def serve(rank: Rank, payload: tuple[str, str]) -> Runner:
    return Runner(rank, *payload)
