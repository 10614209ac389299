"""RLHFDataset: every row has its fields, and one that cannot be used is named."""

import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from asyncrl.config import ColumnMapping, DataConfig
from asyncrl.dataset import RLHFDataset, to_prompt
from asyncrl.errors import DataError
from asyncrl.ports import Json, Messages

WriteRows = Callable[[str, list[Json]], str]

FORMATS = ["x.jsonl", "x.json", "x.parquet"]


def asks(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def full_row(number: int) -> dict[str, Json]:
    return {
        "prompt": asks(f"question {number}"),
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {
            "index": 100 + number,
            "split": "train",
            "tools_kwargs": {"calculator": {"digits": 2}},
            "interaction_kwargs": {"name": "judge"},
        },
        "ability": "math",
    }


def length(messages: Messages) -> int:
    return sum(len(message["content"]) for message in messages)


def failure(path: str, config: DataConfig | None = None) -> str:
    with pytest.raises(DataError) as caught:
        RLHFDataset([path], config or DataConfig())
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(path, "FILE")


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_has_its_fields_and_all_other_columns(write_rows: WriteRows, name: str) -> None:
    dataset = RLHFDataset([write_rows(name, [full_row(0), full_row(1)])], DataConfig())
    assert len(dataset) == 2
    assert dataset[1] == {
        "raw_prompt": asks("question 1"),
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": full_row(1)["extra_info"],
        "index": 101,
        "tools_kwargs": {"calculator": {"digits": 2}},
        "interaction_kwargs": {"name": "judge"},
        "ability": "math",
    }
    assert dataset.where(1).endswith(f"{name}, {'line' if name == 'x.jsonl' else 'row'} 2")
    with pytest.raises(IndexError):
        dataset[2]


def test_what_a_row_leaves_out_has_a_default(write_rows: WriteRows) -> None:
    rows: list[Json] = [{"prompt": asks("a")}, {"raw_prompt": asks("b"), "extra_info": None, "reward_model": {}}]
    dataset = RLHFDataset([write_rows("sums.jsonl", rows)], DataConfig())
    assert [dataset[0], dataset[1]] == [
        {
            "raw_prompt": asks(text),
            "data_source": "sums",
            "reward_model": {"ground_truth": None},
            "extra_info": {},
            "index": number,
            "tools_kwargs": {},
            "interaction_kwargs": {},
        }
        for number, text in enumerate("ab")
    ]


def test_prompt_key_comes_before_raw_prompt(write_rows: WriteRows) -> None:
    path = write_rows("x.jsonl", [{"talk": asks("a"), "prompt": "untouched"}, {"raw_prompt": asks("b")}])
    dataset = RLHFDataset([path], DataConfig(prompt_key="talk"))
    assert [row["raw_prompt"] for row in (dataset[0], dataset[1])] == [asks("a"), asks("b")]
    assert dataset[0]["prompt"] == "untouched"
    assert "talk" not in dataset[0]


def test_kwargs_and_index_are_also_taken_from_columns(write_rows: WriteRows) -> None:
    row = {
        "prompt": asks("a"),
        "index": "id-7",
        "tools_kwargs": {"a": {}},
        "interaction_kwargs": {"b": 1},
        "extra_info": {"index": None},
    }
    dataset = RLHFDataset([write_rows("x.jsonl", [row])], DataConfig())
    assert (dataset[0]["index"], dataset[0]["tools_kwargs"], dataset[0]["interaction_kwargs"]) == ("id-7", {"a": {}}, {"b": 1})


def test_index_zero_of_extra_info_is_kept(write_rows: WriteRows) -> None:
    rows = [{"prompt": asks("a")}, {"prompt": asks("b"), "index": 5, "extra_info": {"index": 0}}]
    assert RLHFDataset([write_rows("x.jsonl", rows)], DataConfig())[1]["index"] == 0


@pytest.mark.parametrize("name", FORMATS)
def test_a_plain_table_is_mapped_and_keeps_its_columns(write_rows: WriteRows, name: str) -> None:
    mapping = ColumnMapping(prompt="{question}", ground_truth="{answer}", ground_truth_after="####", data_source="gsm8k")
    dataset = RLHFDataset([write_rows(name, [{"question": "1 + 1?", "answer": "It is 2.\n#### 2"}])], DataConfig(mapping=mapping))
    assert dataset[0] == {
        "question": "1 + 1?",
        "answer": "It is 2.\n#### 2",
        "raw_prompt": asks("1 + 1?"),
        "data_source": "gsm8k",
        "reward_model": {"ground_truth": "2"},
        "extra_info": {},
        "index": 0,
        "tools_kwargs": {},
        "interaction_kwargs": {},
    }


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "x"}, "no column 'prompt' (data.prompt_key); columns: 'question'"),
        ({"prompt": None}, "prompt must be a list of messages, got null"),
        ({"prompt": "x"}, "prompt is a text, not a list of messages"),
        ({"prompt": [{"role": "user"}]}, "prompt[0].content is missing"),
        ({"prompt": asks("x"), "data_source": 7}, "data_source must be a text, got a number"),
        ({"prompt": asks("x"), "reward_model": "rule"}, "reward_model must be an object, got a text"),
        ({"prompt": asks("x"), "extra_info": [1]}, "extra_info must be an object, got a list"),
        ({"prompt": asks("x"), "extra_info": {"tools_kwargs": "x"}}, "extra_info.tools_kwargs must be an object, got a text"),
        ({"prompt": asks("x"), "interaction_kwargs": 1.5}, "interaction_kwargs must be an object, got a number"),
        ({"prompt": asks("x"), "images": ["a.png"]}, "column 'images' is not empty: rows with images, video or audio"),
        ({"prompt": asks("x"), "audio": "a.wav"}, "column 'audio' is not empty: rows with images, video or audio"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(write_rows: WriteRows, name: str, row: Json, says: str) -> None:
    good = {**dict.fromkeys(row), "prompt": asks("x"), "images": []} if name != "x.parquet" else row
    place = "line" if name == "x.jsonl" else "row"
    message = failure(write_rows(name, [good, row]))
    assert message.startswith(f"FILE, {place} {1 if name == 'x.parquet' else 2}: {says}")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"extra_info": {"made": {"day": date(2026, 1, 2)}}},
            r"extra_info\.made\.day is a date \(.*\); turn it into a text",
        ),
        ({"reward_model": {"ground_truth": [b"7"]}}, r"ground_truth\[0\] is a bytes \(b'7'\)"),
        ({"tools_kwargs": {"search": {"from": date(2026, 1, 2)}}}, r"tools_kwargs\.search\.from is a date"),
    ],
)
def test_what_the_journal_could_not_keep_is_refused_before_the_run(write_rows: WriteRows, row: Json, says: str) -> None:
    with pytest.raises(DataError, match=rf"x\.parquet, row 1: {says}"):
        RLHFDataset([write_rows("x.parquet", [{"prompt": asks("x"), **row}])], DataConfig(), key="FILE")


def test_other_columns_may_hold_what_they_like(write_rows: WriteRows) -> None:
    rows = RLHFDataset([write_rows("x.parquet", [{"prompt": asks("x"), "day": date(2026, 1, 2)}])], DataConfig())
    assert rows[0]["day"] == date(2026, 1, 2)


def test_a_table_without_mapping_is_told_about_it(write_rows: WriteRows) -> None:
    assert 'set data.mapping.prompt, such as "{question}"' in failure(write_rows("x.jsonl", [{"question": "x", "answer": "y"}]))


def test_a_mapped_prompt_that_is_blank_is_refused(write_rows: WriteRows) -> None:
    config = DataConfig(mapping=ColumnMapping(prompt="{question}"))
    assert "data.mapping.prompt is blank" in failure(write_rows("x.jsonl", [{"question": " "}]), config)


@pytest.mark.parametrize("name", FORMATS)
def test_overlong_prompts_are_dropped_with_their_places(write_rows: WriteRows, name: str) -> None:
    path = write_rows(name, [{"prompt": asks("x" * size)} for size in (1, 9, 3, 8, 5)])
    dataset = RLHFDataset([path], DataConfig())
    place = "line" if name == "x.jsonl" else "row"
    assert dataset.filter_overlong(length, 5, drop=True) == [f"{path}, {place} 2", f"{path}, {place} 4"]
    assert [dataset[number]["index"] for number in range(len(dataset))] == [0, 2, 4]
    assert dataset.where(1) == f"{path}, {place} 3"
    assert dataset.filter_overlong(length, 5, drop=False) == []


def test_without_dropping_the_first_overlong_prompt_is_an_error(write_rows: WriteRows) -> None:
    dataset = RLHFDataset([write_rows("x.jsonl", [{"prompt": asks("x" * size)} for size in (1, 9, 8)])], DataConfig())
    with pytest.raises(
        DataError, match=r"line 2: the prompt has 9 tokens, more than data.max_prompt_length = 5 \(2 rows are longer\)"
    ):
        dataset.filter_overlong(length, 5, drop=False)
    assert len(dataset) == 3


def test_dropping_every_row_is_an_error(write_rows: WriteRows) -> None:
    dataset = RLHFDataset(
        [write_rows("x.jsonl", [{"prompt": asks("x" * size)} for size in (9, 8)])], DataConfig(), key="data.val_files"
    )
    with pytest.raises(DataError, match=r"data.val_files: all 2 prompts are longer .* \(the shortest has 8: .*line 2\)"):
        dataset.filter_overlong(length, 5, drop=True)
    assert len(dataset) == 2


def test_a_prompt_that_cannot_be_rendered_is_named(write_rows: WriteRows) -> None:
    def measure(messages: Messages) -> int:
        if messages[0]["content"] == "b":
            raise TypeError("roles must\nalternate")
        return 1

    dataset = RLHFDataset([write_rows("x.jsonl", [{"prompt": asks("a")}, {"prompt": asks("b")}])], DataConfig())
    with pytest.raises(
        DataError, match=r"x.jsonl, line 2: the prompt cannot be rendered: TypeError: roles must alternate"
    ) as caught:
        dataset.filter_overlong(measure, 5)
    assert isinstance(caught.value.__cause__, TypeError)


def test_an_interrupt_while_measuring_passes(write_rows: WriteRows) -> None:
    def measure(messages: Messages) -> int:
        raise KeyboardInterrupt

    dataset = RLHFDataset([write_rows("x.jsonl", [{"prompt": asks("a")}])], DataConfig())
    with pytest.raises(KeyboardInterrupt):
        dataset.filter_overlong(measure, 5)


def test_max_rows_and_the_key_of_messages(write_rows: WriteRows) -> None:
    path = write_rows("x.jsonl", [{"prompt": asks("a")}] * 3)
    assert len(RLHFDataset([path], DataConfig(), max_rows=2)) == 2
    with pytest.raises(DataError, match=r"data.val_files: missing.jsonl"):
        RLHFDataset(["missing.jsonl"], DataConfig(), key="data.val_files")


def test_a_prompt_carries_the_whole_row_and_owns_it(write_rows: WriteRows) -> None:
    dataset = RLHFDataset([write_rows("x.jsonl", [full_row(3)])], DataConfig())
    prompt = to_prompt(dataset[0], uid="u", global_steps=4)
    assert (prompt.uid, prompt.global_steps, prompt.messages, prompt.data_source) == ("u", 4, asks("question 3"), "sums")
    assert (prompt.ground_truth, prompt.extra_info) == ("3", full_row(3)["extra_info"])
    assert prompt.tools_kwargs == {"calculator": {"digits": 2}}
    assert prompt.columns == {
        "ability": "math",
        "index": 103,
        "interaction_kwargs": {"name": "judge"},
        "reward_model": {"style": "rule", "ground_truth": "3"},
    }
    prompt.messages.append({"role": "assistant", "content": "changed"})
    prompt.messages[0]["content"] = "changed"
    prompt.tools_kwargs["calculator"]["digits"] = 9
    assert to_prompt(dataset[0], uid="u", global_steps=4).messages == asks("question 3")
    assert dataset[0]["tools_kwargs"] == {"calculator": {"digits": 2}}


def test_importing_the_dataset_loads_neither_torch_nor_pyarrow() -> None:
    code = "import sys, asyncrl.dataset, asyncrl.feed; print(sorted({'torch', 'tensordict', 'pyarrow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- real text --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("split", "num_rows"), [("train", 7473), ("test", 1319)])
def test_gsm8k_is_read_whole_by_configuration_alone(gsm8k: Path, split: str, num_rows: int) -> None:
    mapping = ColumnMapping(prompt="{question}", ground_truth="{answer}", ground_truth_after="####", data_source="gsm8k")
    dataset = RLHFDataset([str(gsm8k / f"{split}.jsonl")], DataConfig(mapping=mapping))
    rows = [dataset[position] for position in range(len(dataset))]
    assert len(rows) == num_rows
    for row in rows:
        assert row["raw_prompt"] == [{"role": "user", "content": row["question"]}]
        truth = row["reward_model"]["ground_truth"]
        assert row["answer"].endswith(f"#### {truth}")
        assert float(truth.replace(",", "")) == int(float(truth.replace(",", "")))
