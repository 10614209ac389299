"""The quick start's configurations: they load, and fit the problems, the model and one another."""

import shutil
from pathlib import Path

import pytest
import typer

from asyncrl.agents.chat_template import ChatTemplate, load_chat_template
from asyncrl.config import ModelConfig, SFTRun, TrainRun, load_run
from asyncrl.dataset import RLHFDataset
from asyncrl.examples.calculator import TRAIN_ROWS, VAL_ROWS, QuickstartFiles, demonstrations, make, train_rows, val_rows
from asyncrl.examples.demonstrator import Habit
from asyncrl.examples.quickstart import INTERRUPTED, SFT_CONFIG, TRAIN_CONFIG, sft_overrides, train_overrides, warm_start
from asyncrl.preflight import check_sft, check_train
from asyncrl.sft import encode_conversation
from asyncrl.stopping import Stop
from asyncrl.tools import load_tools

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> QuickstartFiles:
    return make(tmp_path_factory.mktemp("runs") / "quickstart-data", seed=1)


def test_the_folder_passes_the_checks_of_both_runs(files: QuickstartFiles, tmp_path: Path) -> None:
    sft = load_run(SFTRun, CONFIGS / SFT_CONFIG, sft_overrides(files, runs=tmp_path, seed=2))
    check_sft(sft)
    run = load_run(TrainRun, CONFIGS / TRAIN_CONFIG, train_overrides(files, files.model, runs=tmp_path, seed=2))
    inputs = check_train(run)
    assert (len(inputs.train_rows), len(inputs.val_rows or ())) == (TRAIN_ROWS, VAL_ROWS)
    assert run.trainer.total_training_steps * run.data.train_batch_size <= TRAIN_ROWS
    assert sft.trainer.seed == run.trainer.seed == 2


def test_defaults_name_the_folder_that_the_command_writes() -> None:
    default = QuickstartFiles(folder=Path("runs/quickstart-data"))
    sft = load_run(SFTRun, CONFIGS / SFT_CONFIG)
    run = load_run(TrainRun, CONFIGS / TRAIN_CONFIG)
    assert sft.model.path == str(default.model)
    assert sft.sft.stages == [[str(default.mechanics)], [str(default.style)]]
    assert (run.data.train_files, run.data.val_files) == ([str(default.train)], [str(default.val)])
    assert run.model.path == f"{sft.trainer.default_local_dir}/{sft.trainer.experiment_name}/hf"


def test_same_seed_same_bytes(files: QuickstartFiles, tmp_path: Path) -> None:
    again = make(tmp_path / "again", seed=1)
    for one, other in zip(sorted(files.folder.rglob("*")), sorted(again.folder.rglob("*")), strict=True):
        assert one.is_dir() or one.read_bytes() == other.read_bytes(), one


def test_every_prompt_and_useful_trajectory_fits(files: QuickstartFiles, tmp_path: Path) -> None:
    run = load_run(TrainRun, CONFIGS / TRAIN_CONFIG, train_overrides(files, files.model, runs=tmp_path, seed=1))
    template = template_of(files)
    prompts = [row["prompt"] for row in (*train_rows(1), *val_rows())]
    assert max(len(template.prompt_ids(prompt)) for prompt in prompts) <= run.data.max_prompt_length
    talks = [encode_conversation(talk, template) for talk in demonstrations({Habit.GOOD: 1.0}, 300, seed=1, name="any")]
    assert max(len(talk.mask) for talk in talks) <= run.data.max_response_length / 2


def template_of(files: QuickstartFiles) -> ChatTemplate:
    return load_chat_template(ModelConfig(path=str(files.model)), [tool.schema for tool in load_tools(["calculator"]).values()])


def test_an_interrupted_warm_start_is_not_trained_on(files: QuickstartFiles, tmp_path: Path) -> None:
    few = QuickstartFiles(folder=tmp_path / "few")
    shutil.copytree(files.model, few.model)
    for whole, part in ((files.mechanics, few.mechanics), (files.style, few.style)):
        part.write_text("".join(whole.read_text().splitlines(keepends=True)[:20]))
    stop = Stop()
    stop.request()
    with pytest.raises(typer.Exit) as caught:
        warm_start(CONFIGS, few, runs=tmp_path, seed=1, stop=stop)
    assert caught.value.exit_code == INTERRUPTED


@pytest.mark.parametrize("name", ["hf_model.toml", "gsm8k.toml"])
def test_other_configurations_load(name: str) -> None:
    load_run(TrainRun, CONFIGS / name)


def test_gsm8k_needs_no_conversion(tmp_path: Path) -> None:
    table = tmp_path / "train.jsonl"
    table.write_text('{"question": "How many?", "answer": "3 + 4 = <<3+4=7>>7\\n#### 1,007"}\n')
    data = load_run(TrainRun, CONFIGS / "gsm8k.toml").data
    row = RLHFDataset([str(table)], data)[0]
    assert [message["role"] for message in row["raw_prompt"]] == ["system", "user"]
    assert row["raw_prompt"][1]["content"] == "How many?"
    assert row["reward_model"]["ground_truth"] == "1,007"
