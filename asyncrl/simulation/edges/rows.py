"""Rows of a dataset that nobody wrote: each knows how long its prompt is."""

from asyncrl.config.simulation import Scenario
from asyncrl.ports import Json
from asyncrl.simulation.draws import draw_count, unit
from asyncrl.world import derive_seed


class SimRows:
    """`sim.prompts.count` rows, made when they are asked for."""

    def __init__(self, scenario: Scenario, *, count: int | None = None) -> None:
        """count: of rows, where it is another."""
        self._config = scenario.sim.prompts
        self._count = scenario.sim.prompts.count if count is None else count
        self._tokens_per_id = scenario.sim.sessions.tokens_per_id
        self._longest = scenario.data.max_prompt_length
        self._seed = derive_seed("rows", scenario.trainer.seed)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> dict[str, Json]:
        tokens = draw_count(self._config.prompt_len, unit(self._seed, position))
        length = max(2, min(-(-tokens // self._tokens_per_id), self._longest))
        return {
            "raw_prompt": [{"role": "user", "content": f"{length} {position}"}],
            "data_source": "simulated",
            "reward_model": {"ground_truth": None},
            "extra_info": {"index": position},
            "index": position,
            "tools_kwargs": {},
            "interaction_kwargs": {},
        }
