"""``tools data``: raw files in the schema of each hub data set become rows that verl's reward functions score."""

import json
from pathlib import Path

import pandas as pd
import pytest
from datasets import load_dataset
from verl.utils.reward_score import default_compute_score

from recipe.partial_rollout.tools.data.command import main
from recipe.partial_rollout.tools.data.named import DATA_SETS

SAMPLE = Path(__file__).parents[1] / "samples" / "gsm8k"


def dapo_row(problem, answer, index="0"):
    content = f"Solve.\n\n{problem}\n\nAnswer:"
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(path, index=False)
    return path


def convert(name, out, place):
    return main([name, "--out", str(out), "--from", str(place)])


def rows_of(path):
    """As verl's RLHFDataset reads them."""
    return list(load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(path.parent / "cache")))


def test_gsm8k_rows_have_verls_schema(tmp_path):
    assert convert("gsm8k", tmp_path, SAMPLE) == 0
    train, test = (rows_of(tmp_path / "gsm8k" / f"{split}.parquet") for split in ("train", "test"))
    assert (len(train), len(test)) == (16, 4)
    assert set(train[0]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert train[3]["reward_model"] == {"style": "rule", "ground_truth": "1200"}
    assert [row["extra_info"] for row in test] == [{"split": "test", "index": i} for i in range(4)]
    (message,) = train[0]["prompt"]
    assert message["role"] == "user" and message["content"].startswith("Mia has 3 bags")


@pytest.mark.parametrize(("answer", "score"), [("12 - 2 = 10\n#### 10", 1.0), ("#### 11", 0.0), ("10", 0.0)])
def test_verl_scores_gsm8k_rows(tmp_path, answer, score):
    convert("gsm8k", tmp_path, SAMPLE)
    row = rows_of(tmp_path / "gsm8k" / "train.parquet")[0]
    assert default_compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"]) == score


def test_folder_of_the_hub_is_read_in_its_main_configuration(tmp_path):
    def raw(question):
        return [{"question": question, "answer": "#### 1"}]

    for folder in ("main", "socratic"):
        for split in ("train", "test"):
            name = f"{split}-00000-of-00001.parquet"
            write_parquet(tmp_path / "hub" / folder / name, raw(f"{folder} {split}"))
    assert convert("gsm8k", tmp_path, tmp_path / "hub") == 0
    contents = [rows_of(tmp_path / "gsm8k" / f"{split}.parquet") for split in ("train", "test")]
    assert [row["prompt"][0]["content"].split(" Let")[0] for (row,) in contents] == ["main train", "main test"]


def test_prompts_are_written_once_in_the_order_of_their_first_row(tmp_path, capsys):
    raw = [dapo_row(problem, "7") for problem in "abcab" * 20]
    place = write_parquet(tmp_path / "raw" / "data" / "dapo-math-17k.parquet", raw)
    assert convert("dapo_math17k", tmp_path, place.parents[1]) == 0
    rows = rows_of(tmp_path / "dapo_math17k" / "train.parquet")
    assert [row["prompt"][0]["content"].split()[1] for row in rows] == ["a", "b", "c"]
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2]
    assert " 97 " in capsys.readouterr().out


@pytest.mark.parametrize(("answer", "acc"), [("so\nAnswer: 34", True), ("Answer: 35", False)])
def test_verl_scores_dapo_rows(tmp_path, answer, acc):
    convert("dapo_math17k", tmp_path, write_jsonl(tmp_path / "raw.jsonl", [dapo_row("a", "34")]))
    (row,) = rows_of(tmp_path / "dapo_math17k" / "train.parquet")
    assert default_compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"])["acc"] is acc


@pytest.mark.parametrize(
    "raw",
    [dapo_row("x", "033"), {"id": 60, "problem": "x", "solution": "", "answer": "033", "url": "", "year": "2024"}],
)
def test_both_sources_of_aime24_are_scored_alike(tmp_path, raw):
    assert convert("aime24", tmp_path, write_jsonl(tmp_path / "raw.jsonl", [raw])) == 0
    (row,) = rows_of(tmp_path / "aime24" / "test.parquet")
    assert row["prompt"][0]["content"].split("\n\n")[1] == "x" and row["extra_info"]["split"] == "test"
    assert default_compute_score(row["data_source"], "Answer: 33", row["reward_model"]["ground_truth"])["acc"] is True


def test_every_data_source_has_a_reward_function_in_verl():
    for data_set in DATA_SETS.values():
        default_compute_score(data_set.data_source, "Answer: 1", "1")


def test_tokens_are_counted_with_a_tokenizer(tmp_path, capsys):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    assert main(["gsm8k", "--out", str(tmp_path), "--from", str(SAMPLE), "--tokenizer", str(tmp_path / "model")]) == 0
    assert "median tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        (
            "dapo_math17k",
            [{"text": "a"}],
            "row 0 is not in the schema of BytedTsinghua-SIA/DAPO-Math-17k: no 'problem'",
        ),
        ("dapo_math17k", [], "no rows"),
        ("gsm8k", [{"question": "a", "answer": "#### 1"}], "a folder with a file of each split (train, test)"),
    ],
)
def test_raw_file_that_does_not_fit_is_refused_in_one_line(tmp_path, capsys, name, rows, message):
    assert convert(name, tmp_path, write_jsonl(tmp_path / "raw.jsonl", rows)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("error: ") and message in line
    assert not list(tmp_path.rglob("*.parquet"))


def test_answer_without_its_mark_is_named_by_row(tmp_path, capsys):
    rows = [{"question": "a", "answer": "#### 1"}, {"question": "b", "answer": "two"}]
    for split in ("train", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", rows)
    assert convert("gsm8k", tmp_path / "out", tmp_path) == 2
    assert "row 1 is not in the schema of openai/gsm8k: no #### in the answer 'two'" in capsys.readouterr().err


def test_missing_place_and_broken_file_are_refused(tmp_path, capsys):
    assert convert("aime24", tmp_path, tmp_path / "nowhere") == 2
    assert "nowhere: an existing file or folder" in capsys.readouterr().err
    (tmp_path / "raw.jsonl").write_text("{broken\n")
    assert convert("aime24", tmp_path, tmp_path / "raw.jsonl") == 2
    assert "raw.jsonl cannot be read" in capsys.readouterr().err


def test_hub_that_cannot_be_reached_says_how_to_get_the_files(tmp_path, capsys, monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert main(["gsm8k", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "openai/gsm8k cannot be downloaded" in line and "--from DIR" in line
    assert "`hf download openai/gsm8k --repo-type dataset --local-dir DIR`" in line
