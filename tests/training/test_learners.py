"""What the models of a run write comes back, goes on bit for bit, and loads as any model; what is not theirs changes nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from asyncrl.config import ModelConfig, TrainRun
from asyncrl.errors import CheckpointError
from asyncrl.training.actor import Actor
from asyncrl.training.disk import Disk
from asyncrl.training.learners import Learners, open_learners
from asyncrl.training.mesh import full_copy

MakeModel = Callable[..., Path]
MakeRun = Callable[..., TrainRun]
MakeColumns = Callable[..., TensorDict]

LENGTHS = [(3, 5), (3, 9), (6, 4), (6, 12)]
UIDS = ["a", "a", "b", "b"]
OPTIM = {"lr": 0.01, "lr_scheduler_type": "cosine", "weight_decay": 0.1, "lr_warmup_steps": 2}
GAE = {"adv_estimator": "gae"}


@pytest.fixture
def run(make_model: MakeModel, make_run: MakeRun) -> TrainRun:
    """With a critic."""
    return make_run(make_model(), algorithm=GAE, actor={"optim": OPTIM}, critic={"optim": OPTIM})


@pytest.fixture
def learners(run: TrainRun, make_columns: MakeColumns) -> Learners:
    """With moments."""
    opened = open_learners(run)
    _update(opened, make_columns(LENGTHS))
    return opened


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


def _assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() != set()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def _files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_written_comes_back(tmp_path: Path, run: TrainRun, learners: Learners) -> None:
    counters = learners.write(tmp_path / "c", model=run.model)
    one = {"updates": 1, "skipped_updates": 0, "skipped_in_a_row": 0}
    assert counters == {"actor": one, "critic": one}
    model = {"model/config.json", "model/model.safetensors"}
    companions = {"model/tokenizer.json", "model/chat_template.jinja", "model/generation_config.json"}
    moments = {"actor/whole.safetensors", "critic/whole.safetensors"}
    assert _files_in(tmp_path / "c").keys() == {
        *model,
        *companions,
        *moments,
        *(f"critic/{name}" for name in model),
        "rng.safetensors",
    }
    other = open_learners(run)
    other.read(tmp_path / "c", counters)
    _assert_same(_everything(learners), _everything(other))


def test_learners_that_have_moments_go_back_to_having_none(tmp_path: Path, run: TrainRun, learners: Learners) -> None:
    beginning = open_learners(run)
    learners.read(tmp_path, beginning.write(tmp_path, model=run.model))
    _assert_same(_everything(beginning), _everything(learners))


@pytest.mark.parametrize("tied", [True, False])
def test_training_goes_on_bit_for_bit(
    tmp_path: Path, make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns, tied: bool
) -> None:
    run = make_run(make_model(tied=tied), algorithm=GAE, actor={"optim": OPTIM}, critic={"optim": OPTIM})
    batches = [make_columns(LENGTHS, seed=seed) for seed in range(4)]
    straight, resumed = open_learners(run), open_learners(run)
    for batch in batches[:2]:
        _update(straight, batch)
    drawn = torch.get_rng_state()
    counters = straight.write(tmp_path, model=run.model)
    for batch in batches[2:]:
        _update(straight, batch)
    _update(resumed, batches[3])  # gathered weights of before are not used
    torch.rand(3)  # the generator is part of it
    resumed.read(tmp_path, counters)
    assert torch.equal(torch.get_rng_state(), drawn)
    for batch in batches[2:]:
        actor, critic = _update(resumed, batch)
    assert (actor["actor/lr"] < 0.01, critic["critic/lr"] < 0.01) == (True, True)
    _assert_same(_everything(straight), _everything(resumed))


def test_of_a_model_with_adapters_they_are_kept_and_the_base_is_not(
    tmp_path: Path, make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns
) -> None:
    folder = make_model()
    run = make_run(folder, model={"lora_rank": 2})
    learners, other, plain = open_learners(run), open_learners(run), open_learners(make_run(folder))
    _update(learners, make_columns(LENGTHS))
    counters = learners.write(tmp_path / "c", model=run.model)
    other.read(tmp_path / "c", counters)
    _assert_same(_everything(learners), _everything(other))
    stored = load_file(tmp_path / "c/actor/whole.safetensors")
    assert {name.partition("/")[0] for name in stored} == {"weight", "exp_avg", "exp_avg_sq", "step"}
    assert all(".lora_" in name for name in stored)
    with pytest.raises(CheckpointError, match=r"of another model: parameter '(step|exp_avg)/\S+lora_A"):
        plain.read(tmp_path / "c", counters)  # whose weights have the names and shapes of the merged ones
    learners.export(tmp_path / "hf", model=run.model)
    assert (tmp_path / "hf/adapter/adapter_model.safetensors").is_file()


def test_what_is_another_models_changes_nothing(
    tmp_path: Path, make_model: MakeModel, make_run: MakeRun, learners: Learners
) -> None:
    before = _everything(learners)
    small = make_run(make_model(seed=1, num_hidden_layers=1), algorithm=GAE)
    counters = open_learners(small).write(tmp_path / "small", model=small.model)
    with pytest.raises(CheckpointError, match=r"of another model: parameter 'model\.layers\.1\S+' differs \(12 in all\)"):
        learners.read(tmp_path / "small", counters)
    wide = make_run(make_model(), algorithm=GAE, critic={"model_path": str(make_model(seed=2, intermediate_size=28))})
    counters = open_learners(wide).write(tmp_path / "wide", model=wide.model)
    with pytest.raises(CheckpointError, match=r"of another model: parameter 'model\.layers\.0\.mlp\S+' differs \(6 in all\)"):
        learners.read(tmp_path / "wide", counters)  # of the critic alone, which comes after the actor
    with pytest.raises(CheckpointError, match="wide: has no critic"):
        learners.read(tmp_path / "wide", {"actor": counters["actor"]})
    _assert_same(before, _everything(learners))


@pytest.mark.parametrize("name", ["model/model.safetensors", "actor/whole.safetensors", "rng.safetensors"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, run: TrainRun, learners: Learners, name: str) -> None:
    counters = learners.write(tmp_path, model=run.model)
    (tmp_path / name).write_bytes(b"x" * 20)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/{name.split('/')[0]}\S* cannot be read: "):
        learners.read(tmp_path, counters)


def test_shards_that_the_disk_refuses_are_an_os_error(tmp_path: Path, learners: Learners) -> None:
    (tmp_path / "file").write_text("")
    parameters = learners.actor.learner.parameters
    with pytest.raises(OSError, match=r"file/actor cannot be written: rank 0: NotADirectoryError: "):
        Disk().write_shards(tmp_path / "file/actor", {name: tensor.detach() for name, tensor in parameters.items()})


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_model_inside_loads_as_any_hugging_face_model(
    tmp_path: Path, make_model: MakeModel, make_run: MakeRun, make_columns: MakeColumns, kind: str, tied: bool
) -> None:
    run = make_run(make_model(kind, tied=tied))
    learners = open_learners(run)
    _update(learners, make_columns(LENGTHS))
    learners.write(tmp_path / "c", model=run.model)
    learners.export(tmp_path / "hf", model=run.model)
    path = tmp_path / "c/model"
    assert _files_in(path) == _files_in(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(path)
    published = learners.snapshot(7)
    assert published.version == 7
    _assert_same(dict(model.named_parameters()), dict(published.tensors))
    assert type(model).__name__.lower() == f"{kind}forcausallm"
    assert (path / "tokenizer.json").read_text() == "{}"
    again = Actor(make_run(path))
    columns = make_columns(LENGTHS, seed=5)
    assert torch.equal(again.log_probs(columns)[0].values(), learners.actor.log_probs(columns)[0].values())


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
    _assert_same(kept, dict(found.tensors))
    assert any(not torch.equal(tensor, kept[name]) for name, tensor in learners.snapshot(3).tensors.items())
