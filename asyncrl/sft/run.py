"""The run of a warm start: a folder with metrics and the model, a bar on the terminal, and an end on request.

cli -> [run] -> warm_start. A stop request ends the run after the update in flight; what was learned so far is exported.
"""

import logging
from functools import partial
from pathlib import Path

from asyncrl.config import SFTRun
from asyncrl.observe.metrics import MetricsLog
from asyncrl.observe.progress import LossBar
from asyncrl.observe.run_folder import RunFolder, create_run_folder
from asyncrl.sft.warm_start import WarmStart
from asyncrl.stopping import Stop, on_signals
from asyncrl.world import RealWorld

log = logging.getLogger(__name__)


async def run_sft(run: SFTRun, *, stop: Stop | None = None) -> Path:
    """Train, and return the run's folder: config.toml, metrics.jsonl and the model in `hf`. Ctrl-C counts as `stop`.

    Raises UserError for what is wrong with files, rows or model, NonFiniteGradientError when updates keep failing.
    """
    stop = stop or Stop()
    async with RealWorld(run_seed=run.trainer.seed) as world:
        with on_signals(stop):
            warm_start = await world.offload(WarmStart, run, pool="model")
            folder = await world.offload(_open_folder, run)
            num_steps = await _learn(run, warm_start, folder, world, stop)
            await world.offload(warm_start.export, folder.export, pool="model")
    if num_steps < run.sft.total_steps:
        log.warning("stopped after %d of %d steps; %s has the model so far", num_steps, run.sft.total_steps, folder.export)
    return folder.path


def _open_folder(run: SFTRun) -> RunFolder:
    folder = create_run_folder(run.trainer.default_local_dir, run.trainer.experiment_name)
    folder.write_config(run)
    return folder


async def _learn(run: SFTRun, warm_start: WarmStart, folder: RunFolder, world: RealWorld, stop: Stop) -> int:
    """All steps, or those before a stop; returns how many."""
    total = run.sft.total_steps
    metrics = await world.offload(partial(MetricsLog, folder, tensorboard=run.trainer.tensorboard))
    with LossBar(total) as bar:
        try:
            for step in range(1, total + 1):
                if stop.is_requested:
                    return step - 1
                numbers = await world.offload(warm_start.step, pool="model")
                await world.offload(metrics.log, step, numbers)
                bar.step(step, numbers["sft/loss"])
        finally:
            await world.offload(metrics.close)
    return total
