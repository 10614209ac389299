"""A whole step with an agent loop that hands in its session in two trajectories: it learns what it learns from one."""

import math
from pathlib import Path

import pytest

from asyncrl.observe.metrics import read_metrics
from tests.integration.test_training_run import train

pytestmark = pytest.mark.long

LOOPS = """
from dataclasses import replace
from asyncrl.agents.single_turn import SingleTurn

class Whole(SingleTurn):
    pass

class Split(SingleTurn):
    async def run(self, prompt, context):
        (output,) = await super().run(prompt, context)
        half = len(output.response_ids) // 2
        names = ("response_ids", "response_mask", "response_logprobs", "token_versions")
        first = replace(output, **{name: getattr(output, name)[:half] for name in names})
        rest = {name: getattr(output, name)[half:] for name in names}
        second = replace(output, prompt_ids=output.prompt_ids + output.response_ids[:half], **rest)
        return [first, second] if half else [output]
"""
RUNS = {
    "gae, kl in the reward": ["adv_estimator=gae", "gamma=0.9", "use_kl_in_reward=true", "kl_penalty=k3"],
    "remax, several updates": ["adv_estimator=remax", "old_log_probs=recompute"],
    "tokens, weights of the session": ["adv_estimator=optimal_token_baseline", "rollout_correction.rollout_is=sequence"],
    "groups with signal, weights of the session by the policy now": [
        "filter_groups=true",
        "old_log_probs=bypass",
        "rollout_correction={ loss_type = 'reinforce', rollout_is = 'sequence', rollout_is_batch_normalize = true }",
    ],
}
LOSSES = {"remax, several updates": "gspo", "tokens, weights of the session": "geo_mean"}


@pytest.mark.parametrize("name", RUNS)
async def test_how_a_session_is_split_changes_nothing_that_is_learned(config: Path, name: str) -> None:
    (config.parent / "loops.py").write_text(LOOPS)
    keys = [f"algorithm.{key}" for key in RUNS[name]] + ([f"actor.loss_mode={LOSSES[name]}"] if name in LOSSES else [])
    keys += ["actor.ppo_epochs=2", "actor.ppo_mini_batch_size=1", "rollout.n=3", "rollout.deterministic=true"]
    keys += ["data.max_prompt_length=80", "trainer.total_training_steps=1"]
    whole, split = [
        read_metrics(await train(config, f"agent.name=loops:{loop}", *keys) / "metrics.jsonl")[0] for loop in ("Whole", "Split")
    ]
    assert split["response_length/mean"] < 0.7 * whole["response_length/mean"]
    learned = [key for key in whole if key.startswith(("actor/", "critic/", "rollout_corr/"))]
    assert len(learned) > 15
    far = {key: (whole[key], split[key]) for key in learned if not math.isclose(whole[key], split[key], rel_tol=1e-3, abs_tol=2e-6)}
    assert not far
