"""A function of the user that fails in the middle of a run: it is named, and the step before is a checkpoint."""

from pathlib import Path

import pytest

from asyncrl.errors import AlgorithmError
from asyncrl.training.checkpoint import kept_steps
from tests.integration.test_training_run import train

OWN = """
import torch
from asyncrl.algorithms.advantages.inputs import Advantages
from asyncrl.algorithms.losses.inputs import PolicyLoss

steps = updates = 0

def late(inputs):
    global steps
    steps += inputs.rewards_BR.shape != (4, 3)  # not the trials before the run
    if steps == 3:
        raise RuntimeError("no more")
    found = inputs.rewards_BR.sum(1, keepdim=True) * inputs.mask_BR
    return Advantages(advantages_BR=found, returns_BR=found)

def late_loss(inputs):
    global updates
    updates += len(inputs.rows_n) != 3
    loss_n = -inputs.advantages_n * inputs.log_prob_n
    return PolicyLoss(loss_n=loss_n[1:] if updates == 3 else loss_n)
"""


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("algorithm.adv_estimator=late_functions:late", r"^estimator 'late_functions:late' raised RuntimeError: no more \("),
        ("actor.loss_mode=late_functions:late_loss", r"^loss 'late_functions:late_loss' returned loss_n=a tensor \["),
    ],
)
async def test_a_function_that_fails_late_is_named_and_leaves_a_checkpoint_of_the_last_border(
    config: Path, setting: str, message: str
) -> None:
    (config.parent / "late_functions.py").write_text(OWN)
    with pytest.raises(AlgorithmError, match=message):
        await train(config, setting, "trainer.total_training_steps=5")
    assert kept_steps(config.parent / "runs" / "small" / "checkpoints", 3) == [0, 2]
