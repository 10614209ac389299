"""The command line: bad input is one line that names what is wrong, exit code 2, and torch is never loaded for it."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl import __version__, cli, preflight
from asyncrl.errors import DataError, StoreError

Config = Callable[..., Path]

ROW = {"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": "1"}, "data_source": "x"}


@pytest.fixture
def make(tmp_path: Path) -> Config:
    """make(rows=..., toml=...) -> a configuration file beside a model folder that passes the torch-free checks."""

    def make_config(rows: str | bytes | None = None, toml: str = "", name: str = "rows.jsonl", batch: int = 1) -> Path:
        content = json.dumps(ROW) + "\n" if rows is None else rows
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
            (model / file).write_text("{}")
        (model / "chat_template.jinja").write_text("{{ messages }}")
        path = tmp_path / "run.toml"
        path.write_text(f'model.path = "{model}"\ndata.train_files = "{tmp_path / name}"\ndata.train_batch_size = {batch}\n{toml}')
        return path

    return make_config


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command in this process."""
    monkeypatch.setattr(sys, "argv", ["asyncrl", *arguments])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    out, err = capsys.readouterr()
    assert isinstance(exited.value.code, int)
    return exited.value.code, out, err


def remove(path: Path, name: str) -> Path:
    (path.parent / "model" / name).unlink()
    return path


def positions(path: Path, number: int) -> Path:
    (path.parent / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": number}))
    return path


CASES: dict[str, tuple[Callable[[Config], Path], str]] = {
    "missing configuration": (lambda make: make().with_name("no.toml"), "no.toml: no such configuration file"),
    "not TOML": (lambda make: make(toml="[data"), "not valid TOML"),
    "unknown key": (lambda make: make(toml="data.train_filez = 1"), "unknown key data.train_filez; did you mean data.train_files?"),
    "a warm start's configuration": (
        lambda make: make(toml="sft.batch_size = 8"),
        "unknown key sft; it belongs to a configuration of `asyncrl sft`",
    ),
    "wrong type": (lambda make: make(toml='rollout.n = "8"'), "rollout.n = '8'"),
    "key without effect": (lambda make: make(toml="actor.kl_loss_coef = 0.1"), "actor.kl_loss_coef has no effect"),
    "a judge without its key": (
        lambda make: make(
            toml='reward = { manager = "judge", judge = { base_url = "http://localhost/v1", model = "m", api_key_env = "NO_KEY" } }'
        ),
        "reward.judge.api_key_env = 'NO_KEY': there is no such environment variable, or it is empty",
    ),
    "a penalty longer than the response": (
        lambda make: make(toml='reward = { manager = "dapo", overlong_buffer_len = 2000 }'),
        "data.max_response_length = 1024: the penalty would begin at 1024 - 2000 = -976 tokens",
    ),
    "a value that the loss refuses": (
        lambda make: make(toml='actor = { loss_mode = "sapo", loss_options.tau_pos = -1.0 }'),
        "tau_pos = -1.0 must be positive",
    ),
    "a threshold that the correction refuses": (
        lambda make: make(toml="algorithm.rollout_correction = { rollout_rs = 'token_k1', rollout_rs_threshold = 0.5 }"),
        "algorithm.rollout_correction: rollout_rs_threshold = '0.5' for token_k1",
    ),
    "an estimator that does not import": (lambda make: make(toml="algorithm.adv_estimator = 'no_such_module:mine'"), "no_such_mod"),
    "a template that is not there": (
        lambda make: make(
            toml='reward = { manager = "judge", judge = { base_url = "http://localhost/v1", model = "m", prompt = "no.jinja" } }'
        ),
        "reward.judge.prompt = 'no.jinja': cannot be read",
    ),
    "batch does not divide": (lambda make: make(batch=10, toml="actor.ppo_mini_batch_size = 3"), "10 / 3 = 3.33"),
    "more groups than rows": (lambda make: make(batch=10), "data.train_batch_size = 10 but the training files give 1 rows"),
    "missing file": (lambda make: make(toml='data.val_files = "nothing.jsonl"'), "data.val_files"),
    "empty file": (lambda make: make(rows=""), "rows.jsonl"),
    "malformed jsonl line": (lambda make: make(rows=json.dumps(ROW) + '\n{"prompt": \n'), "rows.jsonl, line 2"),
    "truncated parquet": (lambda make: make(rows=b"PAR1\x00\x00", name="rows.parquet"), "rows.parquet"),
    "row without prompt": (lambda make: make(rows='{"data_source": "x"}\n'), "rows.jsonl, line 1"),
    "prompt: null": (lambda make: make(rows='{"prompt": null, "data_source": "x"}\n'), "rows.jsonl, line 1"),
    "model without tokenizer": (lambda make: remove(make(), "tokenizer.json"), "tokenizer"),
    "model without chat template": (lambda make: remove(make(), "chat_template.jinja"), "chat template"),
    "model without weights": (lambda make: remove(make(), "model.safetensors"), "weights"),
    "no such model": (lambda make: make(toml='model.tokenizer_path = "nowhere"'), "nowhere"),
    "no such tool": (
        lambda make: make(toml='agent.name = "tool_agent"\nagent.tools = ["calculater"]'),
        "no tool named 'calculater'; did you mean calculator?",
    ),
    "no such reward": (lambda make: make(toml='reward.function = "exact_mach"'), "exact_match"),
    "reward that does not import": (lambda make: make(toml='reward.function = "no_such_module:score"'), "no_such_module"),
    "no plain folder name": (lambda make: make(toml='trainer.experiment_name = "a/b"'), "trainer.experiment_name = 'a/b'"),
    "no place for runs": (lambda make: make(toml='trainer.default_local_dir = "run.toml/x"'), "run.toml is not a folder"),
    "longer than the model": (
        lambda make: positions(make(toml="data.max_prompt_length = 100\ndata.max_response_length = 29"), 128),
        "has 128 positions, and a trajectory may have 129 tokens",
    ),
    "no such agent": (lambda make: make(toml='agent.name = "tool_agnt"'), "agent.name"),
    "custom agent that does not import": (lambda make: make(toml='agent.name = "no_such_module:Agent"'), "no_such_module"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_and_exit_code_2(
    case: str, make: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, named = CASES[case]
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, monkeypatch, "train", str(prepare(make)))
    assert code == 2, err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert named in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trian", "x"], "No such command 'trian'"),
        (["train"], "Missing argument 'CONFIG.toml'"),
        (["train", "x.toml", "--dryrun"], "No such option: --dryrun"),
        (["eval", "x"], "Missing argument 'file'"),
        (["--verson"], "No such option: --verson"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_line(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {named}")
    assert err.count("\n") == 1
    assert "--help)" in err


def test_without_arguments_it_is_the_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run(capsys, monkeypatch)
    assert code == 2
    assert "Usage: asyncrl" in out + err
    assert "error" not in out + err


def test_the_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(capsys, monkeypatch, "--version") == (0, f"asyncrl {__version__}\n", "")


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (OSError(28, "No space left on device", "runs/a"), 3, "OSError: [Errno 28] No space left on device: 'runs/a'"),
        (ExceptionGroup("", [ExceptionGroup("", [OSError(28, "full")]), StoreError("x")]), 3, "OSError: [Errno 28] full"),
        (ExceptionGroup("", [DataError("rows.jsonl, line 1:\n odd")]), 2, "rows.jsonl, line 1: odd"),
        (MemoryError("no room"), 3, "MemoryError: no room"),
        (StoreError("refused"), 3, "refused"),
    ],
    ids=repr,
)
def test_what_a_run_raises_is_one_line(
    raised: Exception, code: int, said: str, make: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr(preflight, "check_train", fail)
    assert run(capsys, monkeypatch, "train", str(make())) == (code, "", f"error: {said}\n")


def test_our_own_bug_keeps_its_traceback(make: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ExceptionGroup("", [StoreError("refused"), ZeroDivisionError("a bug")])

    monkeypatch.setattr(preflight, "check_train", fail)
    monkeypatch.setattr(sys, "argv", ["asyncrl", "train", str(make())])
    with pytest.raises(ExceptionGroup):
        cli.main()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("command", [["fields"], ["--version"]])
def test_an_output_that_cannot_be_written_is_one_line(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "asyncrl.cli", *command], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr.startswith("error: OSError"), done.stderr.count("\n")) == (3, True, 1)


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncrl.cli", "fields"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    process.stdout.close()
    assert process.communicate(timeout=60)[1] == ""


def test_an_override_that_is_none_is_refused(
    make: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run(capsys, monkeypatch, "train", str(make()), "rollout.n")
    assert (code, err) == (2, "error: override 'rollout.n' is not of the form section.key=value\n")


def test_dry_run_prints_the_configuration_and_the_batch_arithmetic(
    make: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(rows=(json.dumps(ROW) + "\n") * 8, batch=4)
    code, out, _ = run(
        capsys,
        monkeypatch,
        "train",
        str(config),
        "--dry-run",
        "rollout.n=3",
        "actor.ppo_mini_batch_size=2",
        "trainer.total_epochs=2",
    )
    assert code == 0
    assert "4 prompts x 3 sessions = 12 trajectories" in out
    assert "2 groups = 6 trajectories" in out
    assert "2 a training step, 8 in all" in out
    assert "n = 3" in out


def test_fields_prints_the_catalogue(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "fields")
    assert code == 0
    assert "response_mask" in out
    assert "rollout_log_probs" in out


def test_evaluating_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run(capsys, monkeypatch, "eval", str(tmp_path / "none"), str(tmp_path / "rows.jsonl"))
    assert code == 2
    assert "no such checkpoint" in err
    code, _, err = run(capsys, monkeypatch, "eval", str(tmp_path), str(tmp_path / "rows.jsonl"))
    assert code == 2
    assert "neither a checkpoint, nor the folder of a finished run" in err
    (tmp_path / "config.json").write_text("{}")
    code, _, err = run(capsys, monkeypatch, "eval", str(tmp_path), str(tmp_path / "rows.jsonl"))
    assert code == 2
    assert "--config" in err


@pytest.mark.parametrize("inner", ["", "model", "hf"])
def test_a_model_a_checkpoint_and_a_finished_run_can_be_evaluated(tmp_path: Path, inner: str) -> None:
    (tmp_path / inner).mkdir(exist_ok=True)
    (tmp_path / inner / "config.json").write_text("{}")
    assert preflight.model_folder(tmp_path) == tmp_path / inner


@pytest.mark.parametrize(
    "arguments", [["--help"], ["fields"], ["train", "{config}", "--dry-run"], ["train", "{config}", "rollout.m=1"]]
)
def test_nothing_but_a_run_loads_torch(arguments: list[str], make: Config) -> None:
    config = str(make())
    code = textwrap.dedent("""
        import sys
        from asyncrl import cli
        try:
            cli.main()
        finally:
            assert "torch" not in sys.modules, "torch was loaded"
    """)
    command = [sys.executable, "-c", code, *(config if argument == "{config}" else argument for argument in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "torch was loaded" not in done.stderr
    assert done.returncode == (2 if arguments[-1] == "rollout.m=1" else 0), done.stderr
