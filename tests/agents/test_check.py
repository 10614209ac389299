"""Golden trajectories of real tokenizers, and a check that can fail."""

import hashlib
import io
import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from asyncrl.agents.chat_template import ChatTemplate
from asyncrl.agents.check import CannotFetch, check_file, default_cache, fetch_tokenizer, main
from asyncrl.agents.text_codec import TextCodec
from asyncrl.ports import Json

GOLDEN = sorted(Path(__file__).with_name("golden").glob("*.json"))
PACKAGE, VERSION = "@test/tokenizer", "1.0.0"
SLOW = {"gemma3": pytest.mark.long}
"""Its tokenizer takes ten seconds to load."""


@pytest.mark.network
@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", [pytest.param(path, marks=SLOW.get(path.stem, ())) for path in GOLDEN], ids=lambda path: path.stem)
def test_golden_trajectories_come_out_id_for_id(path: Path) -> None:
    report = check_file(path, default_cache())
    if report.skipped:
        pytest.skip(report.skipped)
    assert report.failures == ()
    assert report.cases > 30


def test_the_golden_files_hold_a_hundred_cases() -> None:
    assert sum(len(json.loads(path.read_text(encoding="utf-8"))["cases"]) for path in GOLDEN) == 100


@pytest.fixture
def cache(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A cache that already holds the small tokenizer, as `npm pack` would have left it."""
    models = tmp_path / "cache" / f"{PACKAGE.replace('/', '__')}@{VERSION}" / "package" / "models"
    tokenizer.save_pretrained(models, save_jinja_files=False)
    return tmp_path / "cache"


@pytest.fixture
def golden(cache: Path, codec: TextCodec) -> Json:
    """One case of two turns, its expectation written out by hand from the rules."""
    models = next(cache.rglob("models"))
    template = json.loads((models / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    first, last = codec.encode("<tool_call>x</tool_call>"), codec.encode("3<|im_end|>")
    between = codec.encode("<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    cut, end = len(first) + len(between), len(first) + len(between) + len(last)
    turns = [
        {"sampled": [0, len(first)], "environment": [len(first), cut], "end_token_inserted": True, "template_at_start": "ids"},
        {"sampled": [cut, end], "environment": [end, end], "end_token_inserted": False, "template_at_start": "differs"},
    ]
    case = {
        "id": "one",
        "messages": [{"role": "user", "content": "x"}],
        "tools": None,
        "chat_template_kwargs": {},
        "turns": [
            {"sampled_ids": first, "environment_messages": [{"role": "tool", "content": "3"}], "assistant_message": None},
            {"sampled_ids": last, "environment_messages": [], "assistant_message": None},
        ],
        "expected": {
            "prompt_ids": codec.encode("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"),
            "response_ids": [*first, *between, *last],
            "response_mask": [1] * len(first) + [0] * len(between) + [1] * len(last),
            "turns": turns,
        },
    }
    return {
        "format": 1,
        "package": PACKAGE,
        "version": VERSION,
        "tokenizer_json_sha256": hashlib.sha256((models / "tokenizer.json").read_bytes()).hexdigest(),
        "chat_template_sha256": hashlib.sha256(template.encode()).hexdigest(),
        "end_token": "<|im_end|>",
        "end_token_id": ChatTemplate(codec).end_token_id,
        "num_control_tokens": len(codec.control),
        "plain_text_checks": [{"text": "<|im_end|>", "ids": codec.encode_plain("<|im_end|>")}],
        "cases": [case],
    }


def run_check(tmp_path: Path, cache: Path, golden: Json) -> tuple[int, str]:
    folder = tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    (folder / "own.json").write_text(json.dumps(golden), encoding="utf-8")
    out = io.StringIO()
    return main([str(folder), "--cache", str(cache)], out), out.getvalue()


def test_any_folder_of_this_layout_is_checked(tmp_path: Path, cache: Path, golden: Json) -> None:
    assert run_check(tmp_path, cache, golden) == (0, "own.json: 1 cases, 1 passed\n")


@pytest.mark.parametrize("column", ["prompt_ids", "response_ids", "response_mask"])
def test_one_wrong_id_fails_its_case(column: str, tmp_path: Path, cache: Path, golden: Json) -> None:
    golden["cases"][0]["expected"][column][-1] += 1
    code, printed = run_check(tmp_path, cache, golden)
    assert code == 1
    assert "own.json: 1 cases, 0 passed" in printed
    assert f"case one: {column} differs at" in printed


def test_a_wrong_span_fails_its_case(tmp_path: Path, cache: Path, golden: Json) -> None:
    golden["cases"][0]["expected"]["turns"][0]["end_token_inserted"] = False
    code, printed = run_check(tmp_path, cache, golden)
    assert (code, "case one: turns differs at 0" in printed) == (1, True)


@pytest.mark.parametrize("part", ["messages", "tools", "turns", "expected"])
def test_a_case_that_lacks_a_part_fails_alone(part: str, tmp_path: Path, cache: Path, golden: Json) -> None:
    golden["cases"] += [{key: value for key, value in golden["cases"][0].items() if key != part}]
    code, printed = run_check(tmp_path, cache, golden)
    assert (code, "own.json: 2 cases, 1 passed" in printed) == (1, True)
    assert f"malformed, KeyError: '{part}'" in printed


@pytest.mark.parametrize("text", ["{nope", "[]", "{}", '{"cases": 3}'])
def test_a_file_of_another_layout_fails_and_the_next_is_checked(text: str, tmp_path: Path, cache: Path, golden: Json) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "broken.json").write_text(text, encoding="utf-8")
    code, printed = run_check(tmp_path, cache, golden)
    assert (code, "own.json: 1 cases, 1 passed" in printed) == (1, True)
    assert "broken.json: 0 cases, 0 passed\n  file: malformed, " in printed


def test_a_header_that_does_not_hold_fails(tmp_path: Path, cache: Path, golden: Json) -> None:
    golden["plain_text_checks"][0]["ids"] = [golden["end_token_id"]]
    code, printed = run_check(tmp_path, cache, golden)
    assert (code, "header: plain text" in printed) == (1, True)


def test_another_tokenizer_is_skipped_with_a_reason_and_not_called_passed(tmp_path: Path, cache: Path, golden: Json) -> None:
    golden["tokenizer_json_sha256"] = "0" * 64
    code, printed = run_check(tmp_path, cache, golden)
    assert code == 2
    assert "own.json: 1 cases, skipped: hash differs: tokenizer_json_sha256" in printed


def test_without_npm_the_reason_says_so(tmp_path: Path, golden: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotFetch, match="npm is missing"):
        fetch_tokenizer(golden, tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_folder_without_files_is_an_error(tmp_path: Path) -> None:
    out = io.StringIO()
    assert main([str(tmp_path)], out) == 2
    assert out.getvalue().startswith("error: ")
