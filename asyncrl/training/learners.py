"""The models of a run as one rank holds them, and what is done with all of them: write, read, export, publish.

run, mesh -> [learners] -> policy, critic and reference of the stages; checkpoints; snapshots

The same code runs in the one process and in each rank process: every method is a collective, called by all ranks in one order with
the same arguments. On disk everything has its Hugging Face name, so a checkpoint of any number of ranks, cut in any way, is read by
any other.

    <folder>/model/            the policy as a Hugging Face directory: whole weights, by rank 0
    <folder>/actor/            AdamW's moments and step counts, by all ranks (`dcp`); of a model with adapters these as well
    <folder>/critic/           of a run with a critic: the same of the critic, and its weights in critic/model/
    <folder>/rng.safetensors   torch's random generator, the same on all ranks
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from asyncrl.config import ModelConfig, TrainRun
from asyncrl.errors import CheckpointError
from asyncrl.training.actor import Actor, Reference
from asyncrl.training.checkpoint import Counters
from asyncrl.training.critic import Critic
from asyncrl.training.dcp import on_rank_0, read_shards, shapes_in
from asyncrl.training.disk import Disk
from asyncrl.training.export import AnyLearner, export_policy, write_model
from asyncrl.training.lora import Published
from asyncrl.training.mesh import Mesh, gathered, open_mesh
from asyncrl.training.publication import Snapshot, gather


@dataclass(frozen=True, slots=True, kw_only=True)
class Learners:
    """critic: None unless the advantage wants values; reference: None unless a KL term is on."""

    mesh: Mesh
    model: ModelConfig
    actor: Actor
    critic: Critic | None = None
    reference: Reference | None = None

    def write(self, folder: Path, *, model: ModelConfig, disk: Disk | None = None) -> Counters:
        """All that training goes on from into `folder`, flushed; the counters belong into the manifest.

        model: where tokenizer and template come from. Raises OSError, on all ranks, when the disk of one refuses.
        """
        disk = disk or Disk()
        export_policy(self.actor.learner, folder / "model", model, disk=disk)
        counters = {"actor": _write_moments(self.actor.learner, folder / "actor", disk)}
        if self.critic is not None:
            _write_value_model(self.critic.learner, folder / "critic" / "model", disk)
            counters["critic"] = _write_moments(self.critic.learner, folder / "critic", disk)
        rng = {"torch": torch.get_rng_state()}
        on_rank_0(self.mesh, lambda: disk.write_tensors(folder / "rng.safetensors", rng))
        return counters

    def read(self, folder: Path, counters: Counters) -> None:
        """Go on from what `write` has written, as a run of any number of ranks. Raises CheckpointError, on all ranks; of another
        model, or of a run without a critic, it has changed nothing then."""
        roles: list[tuple[str, AnyLearner, Path, Path]] = [("actor", self.actor.learner, folder / "model", folder / "actor")]
        if self.critic is not None:
            roles.append(("critic", self.critic.learner, folder / "critic" / "model", folder / "critic"))
        for role, learner, weights, moments in roles:
            if role not in counters:
                raise CheckpointError(f"{folder}: has no {role}")
            _check(learner, weights, moments)
        for role, learner, weights, moments in roles:
            _read(learner, weights, moments)
            learner.set_counters(counters[role])
        torch.set_rng_state(_read_rng(folder / "rng.safetensors"))

    def export(self, folder: Path, *, model: ModelConfig) -> None:
        """The policy as a Hugging Face directory. Raises OSError, on all ranks, when the disk refuses."""
        export_policy(self.actor.learner, folder, model)

    def snapshot(self, version: int, into: Mapping[str, torch.Tensor] | None = None) -> Snapshot:
        """The policy's weights now, as `version`; without tensors on other ranks than 0. into: as of `gather`."""
        return self.actor.snapshot(version, into)


def open_learners(run: TrainRun, mesh: Mesh | None = None, *, total_steps: int = 0) -> Learners:
    """The models of a run at its beginning. mesh: None for this process alone; total_steps: of the run, 0 for
    trainer.total_training_steps; in the critic's warm-up the actor rests.

    A collective. Raises ModelError and ConfigError, alike on all ranks.
    """
    torch.manual_seed(run.trainer.seed)
    mesh = mesh or open_mesh()
    steps = total_steps or run.trainer.total_training_steps
    trained = max(steps - run.trainer.critic_warmup, 1)
    actor = Actor(run, mesh, total_updates=trained * run.updates_per_batch)
    shared = actor if run.model.lora_rank else None
    return Learners(
        mesh=mesh,
        model=run.model,
        actor=actor,
        critic=Critic(run, mesh, total_updates=steps * run.updates_per_batch) if run.has_critic else None,
        reference=Reference(run, mesh, actor=shared) if run.needs_reference else None,
    )


# --- writing --------------------------------------------------------------------------------------------------------------------


def _write_value_model(learner: AnyLearner, folder: Path, disk: Disk) -> None:
    """It reads the policy's ids, so the tokenizer beside the policy is its own as well."""
    whole = [Published(name=name, sources=(name,)) for name in learner.parameters]
    tensors = gather(whole, learner.parameters, learner.mesh)
    on_rank_0(learner.mesh, partial(write_model, folder, tensors, learner.module.config_json(), disk=disk))


def _write_moments(learner: AnyLearner, folder: Path, disk: Disk) -> dict[str, int]:
    """And the weights where some are frozen: they are not those of the Hugging Face directory then."""
    tensors = {**_own_weights(learner), **_moments(learner)}
    on_rank_0(learner.mesh, lambda: disk.make_folder(folder))
    if learner.mesh.is_alone:  # the same to a reader, at half the cost: there is nothing to plan
        disk.write_tensors(folder / "whole.safetensors", {name: gathered(tensor) for name, tensor in tensors.items()})
    else:
        disk.write_shards(folder, tensors)
    on_rank_0(learner.mesh, lambda: disk.sync_folder(folder))
    return learner.counters()


def _own_weights(learner: AnyLearner) -> dict[str, torch.Tensor]:
    """The trained ones of a model that is partly frozen, by `weight/<name>`."""
    if len(learner.trained) == len(learner.parameters):
        return {}
    return {f"weight/{name}": parameter.detach() for name, parameter in learner.trained.items()}


def _moments(learner: AnyLearner) -> dict[str, torch.Tensor]:
    """The optimizer's, by `exp_avg/<name>` and so on; nothing before its first step."""
    state = learner.optimizer.state
    return {
        f"{moment}/{name}": tensor
        for name, parameter in learner.trained.items()
        for moment, tensor in state.get(parameter, {}).items()
    }


# --- reading --------------------------------------------------------------------------------------------------------------------


def _check(learner: AnyLearner, weights: Path, moments: Path) -> None:
    """Raises CheckpointError when the weights on disk are of another model, or other ones were trained."""
    stored, own = shapes_in(moments), _own_weights(learner)
    found = {name: size for name, size in stored.items() if name.startswith("weight/")} if own else shapes_in(weights)
    wanted = own or learner.parameters
    wrong = sorted(wanted.keys() ^ found.keys())
    wrong = wrong or [name for name, parameter in wanted.items() if parameter.shape != found[name]]
    wrong = wrong or [name for name in stored if name.partition("/")[2] not in learner.trained]
    if wrong:
        raise CheckpointError(f"the checkpoint is of another model: parameter {wrong[0]!r} differs ({len(wrong)} in all)")


def _read(learner: AnyLearner, weights: Path, moments: Path) -> None:
    own = _own_weights(learner)
    stored = shapes_in(moments)
    state = learner.optimizer.state
    for name, parameter in learner.trained.items():
        if f"step/{name}" in stored:
            state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
        else:
            state.pop(parameter, None)
    if not own:
        read_shards(weights, {name: parameter.detach() for name, parameter in learner.parameters.items()})
    read_shards(moments, {**own, **_moments(learner)})


def _read_rng(path: Path) -> torch.Tensor:
    try:
        return load_file(path)["torch"]
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
