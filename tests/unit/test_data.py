"""``tools data``: raw files in the schema of each hub data set become rows that verl's reward functions score."""

import json
from pathlib import Path

import pandas as pd
import pytest
from datasets import load_dataset
from verl.utils.reward_score import default_compute_score

from recipe.partial_rollout.tasks.answers import compute_score
from recipe.partial_rollout.tools.data.command import main

SAMPLE = Path(__file__).parents[1] / "samples" / "gsm8k"


def dapo_row(problem, answer):
    prompt = [{"content": f"Solve.\n\n{problem}\n\nAnswer:", "role": "user"}]
    return {"data_source": "math_dapo", "prompt": prompt, "reward_model": {"ground_truth": answer, "style": "rule"}}


def convert(name, out, place):
    return main([name, "--out", str(out), "--from", str(place)])


def rows_of(path):
    """As verl's RLHFDataset reads them."""
    return list(load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(path.parent / "cache")))


def test_gsm8k_rows_have_verls_schema(tmp_path, capsys):
    assert convert("gsm8k", tmp_path, SAMPLE) == 0
    assert "repeats left out" in capsys.readouterr().out
    train, test = (rows_of(tmp_path / "gsm8k" / f"{split}.parquet") for split in ("train", "test"))
    assert [row["extra_info"] for row in test] == [{"split": "test", "index": i} for i in range(4)]
    (message,) = train[0]["prompt"]
    assert message["role"] == "user" and message["content"].startswith("Mia has 3 bags")
    for answer, score in (("12 - 2 = 10\n#### 10", 1.0), ("#### 11", 0.0), ("10", 0.0)):
        assert default_compute_score(train[0]["data_source"], answer, train[0]["reward_model"]["ground_truth"]) == score


def test_hub_that_cannot_be_reached_says_how_to_get_the_files(tmp_path, capsys, monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert main(["gsm8k", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "openai/gsm8k cannot be downloaded" in line and "--from DIR" in line
    assert "`hf download openai/gsm8k --repo-type dataset --local-dir DIR`" in line


HALF, PAIR = "\\frac{1}{2}", "\\left( 3, \\frac{\\pi}{2} \\right)"
SETS = {
    # As on the hub: the file's name, and a row; a right answer.
    "dapo_math17k": ("data/dapo-math-17k.parquet", dapo_row("x", "33"), "33"),
    "aime24": ("data/train.jsonl", {"id": 60, "problem": "x", "answer": "033", "url": "", "year": "2024"}, "33"),
    "deepscaler": ("deepscaler.json", {"problem": "x", "answer": HALF, "solution": ""}, "\\dfrac{1}{2}"),
    "deepmath103k": (
        "data/train-00000-of-00010.parquet",
        {"question": "x", "final_answer": HALF, "difficulty": 6.0, "topic": "", "r1_solution_1": ""},
        "$\\frac12$",
    ),
    "aime25": ("test.jsonl", {"problem": "x", "answer": "070", "id": "0"}, "70"),
    "amc23": ("data/test-00000-of-00001.parquet", {"id": 0, "question": "x", "answer": "27.0", "url": ""}, "$27$"),
    "math500": ("test.jsonl", {"problem": "x", "solution": "", "answer": PAIR, "level": 2}, "$(3, \\frac{\\pi}{2})$"),
}


@pytest.mark.parametrize("name", SETS)
def test_sets_are_read_as_the_hub_has_them_and_scored(tmp_path, name):
    file, row, right_answer = SETS[name]
    raw = tmp_path / "hub" / file
    raw.parent.mkdir(parents=True)
    other = dapo_row("y", "33") if "prompt" in row else {**row, "problem" if "problem" in row else "question": "y"}
    rows = [row, other, row]
    if raw.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(raw, index=False)
    else:
        raw.write_text(json.dumps(rows) if raw.suffix == ".json" else "\n".join(map(json.dumps, rows)))
    (raw.parents[len(Path(file).parts) - 1] / "README.md").write_text("a card")
    assert convert(name, tmp_path, tmp_path / "hub") == 0
    (path,) = (tmp_path / name).glob("*.parquet")
    first, second = rows_of(path)
    assert path.stem == first["extra_info"]["split"] == ("train" if name.startswith("d") else "test")
    assert "\n\ny\n\n" in second["prompt"][0]["content"]
    truth = first["reward_model"]["ground_truth"]
    for answer, right in ((right_answer, True), ("5", False)):
        score = default_compute_score if name in ("dapo_math17k", "aime24") else compute_score
        said = score(first["data_source"], f"so\nAnswer: {answer}", truth)
        assert (said["acc"], said["score"]) == (right, 1.0 if right else -1.0), answer


WITHOUT_MARK = [{"question": "a", "answer": "#### 1"}, {"question": "b", "answer": "two"}]


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("dapo_math17k", {"raw": [{"text": "a"}]}, "row 0 is not in the schema of BytedTsinghua-SIA/DAPO-Math-17k"),
        ("dapo_math17k", {"raw": []}, "no rows"),
        ("gsm8k", {"train": WITHOUT_MARK, "test": WITHOUT_MARK}, "row 1 is not in the schema of openai/gsm8k: no ####"),
        ("aime24", {"raw": ["{broken"]}, "raw.jsonl cannot be read"),
        ("deepscaler", {"raw": [{"problem": "a", "answer": None}]}, "None where a text or a number is needed"),
    ],
)
def test_raw_file_that_does_not_fit_is_refused_in_one_line(tmp_path, capsys, name, files, message):
    (tmp_path / "raw").mkdir()
    for stem, rows in files.items():
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (tmp_path / "raw" / f"{stem}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert convert(name, tmp_path / "out", tmp_path / "raw" / ("" if len(files) > 1 else "raw.jsonl")) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("error: ") and message in line
    assert not list(tmp_path.rglob("*.parquet"))
