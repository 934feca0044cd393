"""``tools data``: raw files in the schema of each hub data set become rows that verl's reward functions score."""

import json
from pathlib import Path

import pandas as pd
import pytest
from datasets import load_dataset
from verl.utils.reward_score import default_compute_score

from recipe.partial_rollout.tasks.answers import compute_score
from recipe.partial_rollout.tools.data.command import main
from recipe.partial_rollout.tools.data.named import DATA_SETS
from tests.unit.runs import write_lines

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


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(path, index=False)
    return path


def convert(name, out, place):
    return main([name, "--out", str(out), "--from", str(place)])


def rows_of(path):
    """As verl's RLHFDataset reads them."""
    return list(load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(path.parent / "cache")))


def test_gsm8k_rows_have_verls_schema(tmp_path, capsys):
    assert convert("gsm8k", tmp_path, SAMPLE) == 0
    assert "repeats left out" in capsys.readouterr().out
    train, test = (rows_of(tmp_path / "gsm8k" / f"{split}.parquet") for split in ("train", "test"))
    assert (len(train), len(test)) == (16, 4)
    assert set(train[0]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert train[3]["reward_model"] == {"style": "rule", "ground_truth": "1200"}
    assert [row["extra_info"] for row in test] == [{"split": "test", "index": i} for i in range(4)]
    (message,) = train[0]["prompt"]
    assert message["role"] == "user" and message["content"].startswith("Mia has 3 bags")
    for answer, score in (("12 - 2 = 10\n#### 10", 1.0), ("#### 11", 0.0), ("10", 0.0)):
        assert default_compute_score("openai/gsm8k", answer, train[0]["reward_model"]["ground_truth"]) == score
    assert train[0]["data_source"] == "openai/gsm8k"


def test_folder_of_the_hub_is_read_in_its_main_configuration(tmp_path):
    for folder in ("main", "socratic"):
        for split in ("train", "test"):
            rows = [{"question": f"{folder} {split}", "answer": "#### 1"}]
            write_parquet(tmp_path / "hub" / folder / f"{split}-00000-of-00001.parquet", rows)
    assert convert("gsm8k", tmp_path, tmp_path / "hub") == 0
    (row,) = rows_of(tmp_path / "gsm8k" / "test.parquet")
    assert row["prompt"][0]["content"].startswith("main test")


def test_prompts_are_written_once_in_the_order_of_their_first_row(tmp_path, capsys):
    raw = [dapo_row(problem, "7") for problem in "abcab" * 20]
    place = write_parquet(tmp_path / "raw" / "data" / "dapo-math-17k.parquet", raw)
    assert convert("dapo_math17k", tmp_path, place.parents[1]) == 0
    rows = rows_of(tmp_path / "dapo_math17k" / "train.parquet")
    assert [row["prompt"][0]["content"].split()[1] for row in rows] == ["a", "b", "c"]
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2]
    assert " 97\n" in capsys.readouterr().out


def test_hub_that_cannot_be_reached_says_how_to_get_the_files(tmp_path, capsys, monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert main(["gsm8k", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "openai/gsm8k cannot be downloaded" in line and "--from DIR" in line
    assert "`hf download openai/gsm8k --repo-type dataset --local-dir DIR`" in line


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("dapo_math17k", dapo_row("x", "33")),
        ("aime24", dapo_row("x", "033")),
        ("aime24", {"id": 60, "problem": "x", "solution": "", "answer": "033", "url": "", "year": "2024"}),
    ],
)
def test_verl_scores_rows_of_each_source_alike(tmp_path, name, raw):
    write_lines(tmp_path / "raw.jsonl", [raw])
    assert convert(name, tmp_path, tmp_path / "raw.jsonl") == 0
    (path,) = (tmp_path / name).glob("*.parquet")
    (row,) = rows_of(path)
    assert row["prompt"][0]["content"].split("\n\n")[1] == "x" and row["extra_info"]["split"] == path.stem
    for answer, right in (("so\nAnswer: 33", True), ("Answer: 34", False)):
        score = default_compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"])
        assert score["acc"] is right


SETS = {
    # As on the hub: the file's name, and a row.
    "deepscaler": ("deepscaler.json", {"problem": "x", "answer": "\\frac{1}{2}", "solution": ""}),
    "deepmath103k": (
        "data/train-00000-of-00010.parquet",
        {"question": "x", "final_answer": "\\frac{1}{2}", "difficulty": 6.0, "topic": "", "r1_solution_1": ""},
    ),
    "aime25": ("test.jsonl", {"problem": "x", "answer": "070", "id": "0"}),
    "amc23": ("data/test-00000-of-00001.parquet", {"id": 0, "question": "x", "answer": "27.0", "url": ""}),
    "math500": (
        "test.jsonl",
        {"problem": "x", "solution": "", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "subject": "", "level": 2},
    ),
}
RIGHT = {
    "aime25": "70",
    "amc23": "$27$",
    "math500": "$(3, \\frac{\\pi}{2})$",
    "deepmath103k": "$\\frac12$",
    "deepscaler": "\\dfrac{1}{2}",
}


@pytest.mark.parametrize("name", SETS)
def test_sets_of_april_are_read_as_the_hub_has_them_and_scored(tmp_path, name):
    file, row = SETS[name]
    raw = tmp_path / "hub" / file
    raw.parent.mkdir(parents=True)
    rows = [row, {**row, "problem" if "problem" in row else "question": "y"}, row]
    if raw.suffix == ".parquet":
        write_parquet(raw, rows)
    else:
        raw.write_text(json.dumps(rows) if raw.suffix == ".json" else "\n".join(map(json.dumps, rows)))
    (raw.parents[len(Path(file).parts) - 1] / "README.md").write_text("a card")
    assert convert(name, tmp_path, tmp_path / "hub") == 0
    (path,) = (tmp_path / name).glob("*.parquet")
    first, second = rows_of(path)
    assert path.stem == first["extra_info"]["split"] == ("train" if name.startswith("deep") else "test")
    assert "\n\ny\n\n" in second["prompt"][0]["content"]
    truth = first["reward_model"]["ground_truth"]
    for answer, right in ((RIGHT[name], True), ("5", False)):
        said = compute_score(first["data_source"], f"so\nAnswer: {answer}", truth)
        assert (said["acc"], said["score"]) == (right, 1.0 if right else -1.0), answer


def test_each_validation_set_has_a_name_of_its_own():
    """verl's metrics are by data source."""
    names = [each.data_source for each in DATA_SETS.values() if "test" in each.splits]
    assert len({*names}) == len(names)


WITHOUT_MARK = [{"question": "a", "answer": "#### 1"}, {"question": "b", "answer": "two"}]


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("dapo_math17k", {"raw": [{"text": "a"}]}, "row 0 is not in the schema of BytedTsinghua-SIA/DAPO-Math-17k"),
        ("dapo_math17k", {"raw": []}, "no rows"),
        ("gsm8k", {"raw": WITHOUT_MARK}, "a folder with a file of each split (train, test)"),
        ("gsm8k", {"train": WITHOUT_MARK, "test": WITHOUT_MARK}, "row 1 is not in the schema of openai/gsm8k: no ####"),
        ("aime24", {}, "or a folder with one of the split train"),
        ("amc23", {"raw": [{"id": 1, "answer": "2"}]}, "row 0 is not in the schema of math-ai/amc23: no 'question'"),
        ("aime24", {"raw": ["{broken"]}, "raw.jsonl cannot be read"),
        ("deepscaler", {"raw": [{"problem": "a", "answer": None}]}, "None where a text or a number is needed"),
        ("deepscaler", {"raw": [{"problem": None, "answer": "1"}]}, "None where a text or a number is needed"),
        ("deepscaler", {"raw": [{"problem": "a", "answer": ["1"]}]}, "['1'] where a text or a number is needed"),
        ("reasoning_gym", {"raw": [{}]}, "whose problems are not made here as reasoning_gym's are"),
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


def test_parquet_file_that_is_torn_is_refused_in_one_line(tmp_path, capsys):
    whole = write_parquet(tmp_path / "raw.parquet", [{"question": "a", "final_answer": "1"}] * 99).read_bytes()
    (tmp_path / "raw.parquet").write_bytes(whole[:-9])
    assert convert("deepmath103k", tmp_path / "out", tmp_path / "raw.parquet") == 2
    assert "raw.parquet cannot be read: " in capsys.readouterr().err.splitlines()[-1]


def test_whole_number_is_written_as_a_model_answers_it(tmp_path):
    answers = ["033", 27.0, -3.0, "-12", "1.50", "1/2"]
    raw = [{"question": f"q{i}", "answer": answer} for i, answer in enumerate(answers)]
    (tmp_path / "raw.json").write_text(json.dumps(raw))
    assert convert("amc23", tmp_path / "out", tmp_path / "raw.json") == 0
    found = [row["reward_model"]["ground_truth"] for row in rows_of(tmp_path / "out" / "amc23" / "test.parquet")]
    assert found == ["33", "27", "-3", "-12", "1.50", "1/2"]
