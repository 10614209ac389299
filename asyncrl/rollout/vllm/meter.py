"""Meter: steps and tokens of one vLLM, as its own statistics tell them after each step."""

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class Meter:
    """Sums since the start; `kv_cache_usage` is the share of the blocks in use at the last step."""

    beats: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    """Of them, those that the prefix cache held."""
    preemptions: int = 0
    """Requests that gave their blocks back and were computed anew, publications included."""
    kv_cache_usage: float = 0.0

    def record(self, scheduler: Any, iteration: Any) -> None:
        """After a step. scheduler, iteration: vLLM's SchedulerStats and IterationStats, each perhaps None."""
        is_busy = False
        if scheduler is not None:
            is_busy = scheduler.num_running_reqs > 0
            self.kv_cache_usage = scheduler.kv_cache_usage
        if iteration is not None:
            is_busy = True
            self.generated_tokens += iteration.num_generation_tokens
            self.prompt_tokens += iteration.prompt_token_stats.total
            self.cached_prompt_tokens += iteration.prompt_token_stats.cached_tokens
            self.preemptions += iteration.num_preempted_reqs
        self.beats += is_busy

    def stats(self) -> dict[str, float]:
        """By name, without `beats`."""
        return {
            "generated_tokens": self.generated_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_prompt_tokens": self.cached_prompt_tokens,
            "preemptions": self.preemptions,
            "kv_cache_usage": self.kv_cache_usage,
        }
