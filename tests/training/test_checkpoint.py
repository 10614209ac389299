"""Checkpoints: a crash at any file operation, damage of any file, and training that goes on bit for bit."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from asyncrl.config import ModelConfig, TrainRun
from asyncrl.errors import CheckpointError
from asyncrl.training import checkpoint
from asyncrl.training.actor import Actor
from asyncrl.training.checkpoint import (
    Checkpoint,
    Counters,
    delete_damaged,
    find_checkpoints,
    kept_steps,
    open_checkpoint,
    save_checkpoint,
)
from asyncrl.training.disk import Disk
from asyncrl.training.learners import Learners, open_learners
from asyncrl.training.mesh import full_copy

MakeModel = Callable[..., Path]
MakeRun = Callable[..., TrainRun]
MakeColumns = Callable[..., TensorDict]

LENGTHS = [(3, 5), (3, 9), (6, 4), (6, 12)]
UIDS = ["a", "a", "b", "b"]


class Crash(OSError):
    """The process dies here."""


class CrashingDisk(Disk):
    """Dies in the middle of operation `at`: a write leaves half of its bytes, a removal half of its files."""

    def __init__(self, at: int) -> None:
        self.operations = 0
        self._at = at

    def _dies(self) -> bool:
        self.operations += 1
        return self.operations - 1 == self._at

    def make_folder(self, path: Path) -> None:
        if self._dies():
            raise Crash
        super().make_folder(path)

    def write(self, path: Path, content: bytes) -> None:
        if self._dies():
            path.write_bytes(content[: len(content) // 2])
            raise Crash
        super().write(path, content)

    def copy(self, source: Path, target: Path) -> None:
        if self._dies():
            target.touch()
            raise Crash
        super().copy(source, target)

    def write_tensors(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        dies = self._dies()
        super().write_tensors(path, tensors)
        if dies:
            path.write_bytes(path.read_bytes()[:-7])
            raise Crash

    def rename(self, source: Path, target: Path) -> None:
        if self._dies():
            raise Crash
        super().rename(source, target)

    def sync_folder(self, path: Path) -> None:
        if self._dies():
            raise Crash
        super().sync_folder(path)

    def remove(self, path: Path) -> None:
        if self._dies():
            for file in sorted(path.rglob("*"))[::2] if path.is_dir() else []:
                if file.is_file():
                    file.unlink()
            raise Crash
        super().remove(path)


OPTIM = {"lr": 0.01, "lr_scheduler_type": "cosine", "weight_decay": 0.1, "lr_warmup_steps": 2}


@pytest.fixture
def run(make_model: MakeModel, make_run: MakeRun) -> TrainRun:
    """With a critic."""
    return make_run(make_model(), algorithm={"adv_estimator": "gae"}, actor={"optim": OPTIM}, critic={"optim": OPTIM})


def _update(learners: Learners, columns: TensorDict) -> list[dict[str, float]]:
    """A step of training; the metrics of actor and critic."""
    columns["values"], columns["returns"] = columns["rollout_log_probs"] * 0.1, columns["advantages"]
    critic = [] if learners.critic is None else [learners.critic.update(columns, UIDS)]
    return [learners.actor.update(columns, UIDS), *critic]


def _everything(learners: Learners) -> dict[str, torch.Tensor]:
    """Copies of weights and moments."""
    found: dict[str, torch.Tensor] = {}
    for role in ("actor", "critic"):
        if owner := getattr(learners, role):
            for name, parameter in owner.learner.parameters.items():
                moments = owner.learner.optimizer.state.get(parameter, {})
                found |= {f"{role} {kind} {name}": tensor for kind, tensor in {"weight": parameter, **moments}.items()}
    return {name: full_copy(tensor) for name, tensor in found.items()}


def _assert_same(one: Learners, other: Learners) -> None:
    expected, found = _everything(one), _everything(other)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.fixture
def learners(run: TrainRun, make_columns: MakeColumns) -> Learners:
    """With moments."""
    opened = open_learners(run)
    _update(opened, make_columns(LENGTHS))
    return opened


def _write_little(folder: Path, disk: Disk) -> Counters:
    disk.make_folder(folder / "model")
    for name in ("model/config.json", "rng.safetensors"):
        disk.write(folder / name, b"some bytes")
    disk.sync_folder(folder / "model")
    return {"actor": {"updates": 1}}


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """save(step, keep=2, disk=None, name="checkpoints", learners=None, model=None, **controllers) -> path, in
    tmp_path / name.

    learners: None writes two small files in their place. model: None: the only one in tmp_path."""

    def run(
        step: int,
        *,
        keep: int = 2,
        disk: Disk | None = None,
        name: str = "checkpoints",
        learners: Learners | None = None,
        model: ModelConfig | None = None,
        **controllers: float,
    ) -> Path:
        disk = disk or Disk()
        little = partial(_write_little, disk=disk)
        source = ModelConfig(path=str(next(tmp_path.glob("*tied-0"), "")))
        write = little if learners is None else partial(learners.write, model=model or source, disk=disk)
        return save_checkpoint(tmp_path / name, write, step=step, version=step, keep=keep, controllers=controllers, disk=disk)

    return run


def _newest(folder: Path, said: list[str] | None = None, disk: Disk | None = None) -> Checkpoint | None:
    """The newest whole one; damaged ones are deleted."""
    found = find_checkpoints(folder)
    delete_damaged(found, ([] if said is None else said).append, disk)
    return next(iter(found.whole), None)


def _step(tmp_path: Path, name: str = "checkpoints") -> tuple[int | None, list[str]]:
    """Of the newest whole one, and what was said; damaged ones are gone."""
    said: list[str] = []
    found = _newest(tmp_path / name, said)
    return (None if found is None else found.step), said


def test_what_is_saved_comes_back(tmp_path: Path, run: TrainRun, learners: Learners, save: Callable[..., Path]) -> None:
    save(3, learners=learners, kl_coef=0.25)
    found = _newest(tmp_path / "checkpoints")
    assert found is not None
    assert (found.step, found.version, found.controllers) == (3, 3, {"kl_coef": 0.25})
    one = {"updates": 1, "skipped_updates": 0, "skipped_in_a_row": 0}
    assert found.counters == {"actor": one, "critic": one}
    model = {"model/config.json", "model/model.safetensors"}
    companions = {"model/tokenizer.json", "model/chat_template.jinja", "model/generation_config.json"}
    assert {path.relative_to(found.path).as_posix() for path in found.path.rglob("*") if path.is_file()} == {
        *model,
        *companions,
        *(f"critic/{name}" for name in model),
        "actor/whole.safetensors",
        "critic/whole.safetensors",
        "rng.safetensors",
        "manifest.json",
        "DONE",
    }
    other = open_learners(run)
    other.read(found.path, found.counters)
    _assert_same(learners, other)


def test_one_from_before_the_first_update_comes_back(
    tmp_path: Path, run: TrainRun, learners: Learners, save: Callable[..., Path]
) -> None:
    """Into learners that have moments, and lose them."""
    beginning = open_learners(run)
    found = open_checkpoint(save(1, learners=beginning))
    learners.read(found.path, found.counters)
    _assert_same(beginning, learners)


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert _step(tmp_path) == (None, [])


def test_a_crash_at_any_file_operation_leaves_a_whole_checkpoint(
    tmp_path: Path, learners: Learners, save: Callable[..., Path]
) -> None:
    """keep = 1, so the removal of the older one is among the operations. A save afterwards cleans up."""
    counting = CrashingDisk(-1)
    save(1, name="count")
    save(2, name="count", keep=1, disk=counting, learners=learners)
    assert counting.operations > 25
    for at in range(counting.operations):
        name = f"crash-{at}"
        save(1, name=name)
        with pytest.raises(Crash):
            save(2, name=name, keep=1, disk=CrashingDisk(at), learners=learners)
        assert _step(tmp_path, name)[0] in (1, 2), f"nothing whole after a crash in operation {at}"
        save(3, name=name, keep=1)
        assert [path.name for path in (tmp_path / name).iterdir()] == ["global_step_3"]


def test_a_crash_while_a_step_is_saved_again_keeps_the_first(tmp_path: Path, save: Callable[..., Path]) -> None:
    save(1, keep=1)
    at = 0
    while True:
        try:
            save(1, keep=1, disk=CrashingDisk(at))
        except Crash:
            assert _step(tmp_path)[0] == 1, f"nothing whole after a crash in operation {at}"
            at += 1
        else:
            break
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["global_step_1"]


def test_every_file_matters_and_what_is_damaged_is_deleted(tmp_path: Path, learners: Learners, save: Callable[..., Path]) -> None:
    save(1)
    newest, copy = save(2, learners=learners), tmp_path / "copy"
    shutil.copytree(newest, copy)
    for name in [path.relative_to(copy) for path in copy.rglob("*") if path.is_file()]:
        content = (copy / name).read_bytes()
        for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1]), content + b"x", None):
            shutil.copytree(copy, newest, dirs_exist_ok=True)
            (newest / name).unlink() if damaged is None else (newest / name).write_bytes(damaged)
            step, said = _step(tmp_path)
            assert step == 1
            assert len(said) == 1
            assert "global_step_2: " in said[0]
            assert said[0].endswith("; it is deleted")
            assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["global_step_1"]


def test_a_crash_while_a_damaged_one_is_deleted_leaves_it_damaged(tmp_path: Path, save: Callable[..., Path]) -> None:
    """Half a removal is no checkpoint, and is finished the next time."""
    for at in range(2):
        save(1)
        (save(2) / "rng.safetensors").write_bytes(b"x")
        with pytest.raises(Crash):
            _newest(tmp_path / "checkpoints", disk=CrashingDisk(at))
        assert _step(tmp_path)[0] == 1
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["global_step_1"]


def test_the_older_one_is_checked_as_well(tmp_path: Path, save: Callable[..., Path]) -> None:
    """Else it would count as kept, and the steps after it be purged."""
    (save(1) / "rng.safetensors").write_bytes(b"x")
    save(2)
    assert _step(tmp_path) == (2, [f"checkpoint {tmp_path}/checkpoints/global_step_1: rng.safetensors has 1 bytes instead of "
        f"{(tmp_path / 'checkpoints/global_step_2/rng.safetensors').stat().st_size}; it is deleted"])  # fmt: skip
    assert kept_steps(tmp_path / "checkpoints", 2) == [0, 2]


def test_step_0_counts_as_the_oldest_while_there_are_fewer(tmp_path: Path, save: Callable[..., Path]) -> None:
    folder = tmp_path / "checkpoints"
    assert kept_steps(folder, 2) == [0]
    for step, kept in ((2, [0, 2]), (4, [2, 4]), (6, [4, 6])):
        save(step)
        assert kept_steps(folder, 2) == kept
    save(8, keep=3)
    assert kept_steps(folder, 3) == [4, 6, 8]


def test_only_the_newest_are_kept_and_leftovers_go(tmp_path: Path, save: Callable[..., Path]) -> None:
    folder = tmp_path / "checkpoints"
    for step in (2, 9, 10):
        with pytest.raises(Crash):
            save(step + 100, disk=CrashingDisk(6))
        save(step)
    assert sorted(path.name for path in folder.iterdir()) == ["global_step_10", "global_step_9"]
    assert _step(tmp_path) == (10, [])


def test_a_checkpoint_of_a_later_format_is_refused(save: Callable[..., Path]) -> None:
    path = save(1)
    manifest = json.loads((path / "manifest.json").read_text())
    text = json.dumps({**manifest, "format": 99})
    (path / "manifest.json").write_text(text)
    (path / "DONE").write_text(checkpoint._checksum(text.encode()))
    with pytest.raises(CheckpointError, match="has format 99"):
        open_checkpoint(path)
    save(0)
    with pytest.raises(CheckpointError, match="has format 99"):  # going on from step 0 is not what its owner means
        find_checkpoints(path.parent)
    assert (path / "DONE").is_file()


def test_tensors_that_a_full_disk_refuses_are_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"weights\.safetensors cannot be written: "):
        Disk().write_tensors(tmp_path / "no folder" / "weights.safetensors", {"a": torch.zeros(2)})


def test_a_damaged_checkpoint_is_not_kept_in_place_of_a_whole_one(tmp_path: Path, save: Callable[..., Path]) -> None:
    save(1)
    weights = save(2) / "model" / "config.json"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert _step(tmp_path)[0] == 1
    save(3)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["global_step_1", "global_step_3"]
    (tmp_path / "checkpoints/global_step_3/DONE").unlink()
    assert _step(tmp_path)[0] == 1


@pytest.mark.parametrize("tied", [True, False])
def test_training_goes_on_bit_for_bit(
    make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns, save: Callable[..., Path], tied: bool
) -> None:
    run = make_run(make_model(tied=tied), algorithm={"adv_estimator": "gae"}, actor={"optim": OPTIM}, critic={"optim": OPTIM})
    batches = [make_columns(LENGTHS, seed=seed) for seed in range(4)]
    straight, first, resumed = open_learners(run), open_learners(run), open_learners(run)
    for batch in batches:
        _update(straight, batch)
    for batch in batches[:2]:
        _update(first, batch)
    drawn = torch.get_rng_state()
    found = open_checkpoint(save(2, learners=first))
    _update(resumed, batches[3])  # gathered weights of before are not used
    torch.rand(3)  # the generator is part of the state
    resumed.read(found.path, found.counters)
    assert torch.equal(torch.get_rng_state(), drawn)
    for batch in batches[2:]:
        actor, critic = _update(resumed, batch)
    assert (actor["actor/lr"] < 0.01, critic["critic/lr"] < 0.01) == (True, True)
    _assert_same(straight, resumed)


def test_what_cannot_be_read_changes_nothing(
    make_model: MakeModel, make_run: MakeRun, run: TrainRun, learners: Learners, save: Callable[..., Path]
) -> None:
    before = _everything(learners)
    alone = open_checkpoint(save(1, learners=open_learners(make_run(Path(run.model.path)))))
    with pytest.raises(CheckpointError, match="global_step_1: has no critic"):
        learners.read(alone.path, alone.counters)
    other = make_model("qwen2", seed=1, num_hidden_layers=1)
    small = open_checkpoint(save(2, learners=open_learners(make_run(other, algorithm={"adv_estimator": "gae"}))))
    with pytest.raises(CheckpointError, match=r"of another model: parameter 'model\.layers\.1\S+' differs \(12 in all\)"):
        learners.read(small.path, small.counters)
    wide = make_model("qwen2", seed=2, intermediate_size=28)
    for folder in ("model", "critic/model"):  # the first, or only the second
        found = open_checkpoint(save(3, learners=open_learners(make_run(wide, algorithm={"adv_estimator": "gae"}))))
        shutil.copytree(found.path / folder, small.path / folder, dirs_exist_ok=True)
    shutil.copytree(run.model.path, small.path / "model", dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match=r"of another model: parameter 'model\.layers\.0\.mlp\S+' differs \(6 in all\)"):
        learners.read(small.path, small.counters)
    assert all(torch.equal(tensor, before[name]) for name, tensor in _everything(learners).items())


def test_of_a_model_with_adapters_they_are_kept_and_the_base_is_not(
    tmp_path: Path, make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns, save: Callable[..., Path]
) -> None:
    folder = make_model()
    run = make_run(folder, model={"lora_rank": 2})
    learners, other, plain = open_learners(run), open_learners(run), open_learners(make_run(folder))
    _update(learners, make_columns(LENGTHS))
    found = open_checkpoint(save(1, learners=learners, model=run.model))
    other.read(found.path, found.counters)
    _assert_same(learners, other)
    stored = load_file(found.path / "actor/whole.safetensors")
    assert {name.partition("/")[0] for name in stored} == {"weight", "exp_avg", "exp_avg_sq", "step"}
    assert all(".lora_" in name for name in stored)
    with pytest.raises(CheckpointError, match=r"of another model: parameter '(step|exp_avg)/\S+lora_A"):
        plain.read(found.path, found.counters)  # whose weights have the names and shapes of the merged ones
    learners.export(tmp_path / "hf", model=run.model)
    assert (tmp_path / "hf/adapter/adapter_model.safetensors").is_file()


def test_files_that_nobody_checked_are_named(learners: Learners, save: Callable[..., Path]) -> None:
    for name in ("model/model.safetensors", "actor/whole.safetensors", "rng.safetensors"):
        found = open_checkpoint(save(1, learners=learners))
        (found.path / name).write_bytes(b"x" * 20)
        with pytest.raises(CheckpointError, match=rf"global_step_1/{name.split('/')[0]}\S* cannot be read: "):
            learners.read(found.path, found.counters)


def test_a_full_disk_is_an_os_error(tmp_path: Path, learners: Learners) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/actor cannot be written: rank 0: NotADirectoryError: "):
        Disk().write_shards(tmp_path / "file/actor", {"a": torch.zeros(2)})


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_model_inside_loads_as_any_hugging_face_model(
    tmp_path: Path,
    make_model: MakeModel,
    make_run: MakeRun,
    make_columns: MakeColumns,
    save: Callable[..., Path],
    kind: str,
    tied: bool,
) -> None:
    run = make_run(make_model(kind, tied=tied))
    learners = open_learners(run)
    learners.actor.update(make_columns(LENGTHS), UIDS)
    path = save(1, learners=learners) / "model"
    learners.export(tmp_path / "hf", model=run.model)
    assert _bytes_in(path) == _bytes_in(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(path)
    parameters, published = dict(model.named_parameters()), learners.snapshot(7)
    assert published.version == 7
    assert set(parameters) == set(published.tensors)
    assert all(torch.equal(tensor, published.tensors[name]) for name, tensor in parameters.items())
    assert type(model).__name__.lower() == f"{kind}forcausallm"
    assert (path / "tokenizer.json").read_text() == "{}"
    again = Actor(make_run(path))
    columns = make_columns(LENGTHS, seed=5)
    assert torch.equal(again.log_probs(columns)[0].values(), learners.actor.log_probs(columns)[0].values())


def _bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_configured_template_becomes_the_exports_own(tmp_path: Path, run: TrainRun, learners: Learners) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("mine")
    learners.export(tmp_path / "hf", model=ModelConfig(path=run.model.path, chat_template=str(template)))
    assert (tmp_path / "hf" / "chat_template.jinja").read_text() == "mine"


def test_a_snapshot_is_written_where_it_is_asked_to_and_stays_as_it_is(learners: Learners, make_columns: MakeColumns) -> None:
    into = {name: torch.empty_like(tensor) for name, tensor in learners.snapshot(1).tensors.items()}
    found = learners.snapshot(2, into)
    assert all(found.tensors[name] is tensor for name, tensor in into.items())
    kept = {name: tensor.clone() for name, tensor in found.tensors.items()}
    _update(learners, make_columns(LENGTHS))
    assert all(torch.equal(tensor, kept[name]) for name, tensor in found.tensors.items())
    assert any(not torch.equal(tensor, kept[name]) for name, tensor in learners.snapshot(3).tensors.items())
