"""The embedded task: arithmetic, demonstrations, tokenizer, data, warm start and the command that builds them."""

import random
import sys
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from subprocess import run

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.partial_rollout.tasks.clock10 import prepare
from recipe.partial_rollout.tasks.clock10.dataset import draw_training, draw_validation, write_dataset
from recipe.partial_rollout.tasks.clock10.demonstration import Mixture, search_line
from recipe.partial_rollout.tasks.clock10.expression import (
    OPERATORS,
    Problem,
    draw_problem,
    parse_problem,
    partial_results,
    reachable_targets,
)
from recipe.partial_rollout.tasks.clock10.model import build_model
from recipe.partial_rollout.tasks.clock10.reward import compute_score
from recipe.partial_rollout.tasks.clock10.tokenizer import CHARACTERS, build_tokenizer
from recipe.partial_rollout.tasks.clock10.warm_start import IGNORED, WarmStart, draw_batches, train

EXAMPLE = Problem((3, 4, 2, 9), 8)
digits_of_a_problem = st.lists(st.integers(1, 9), min_size=3, max_size=5).map(tuple)
seeds = st.integers(0, 2**32)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def tiny_task(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("clock10") / "task"
    assert prepare.main(["--out", str(out), "--tiny", "--steps", "4"]) == 0
    return out


# --- expressions


def test_the_prompt_is_the_shape_of_the_line_that_solves_it():
    assert EXAMPLE.prompt == "3?4=_?2=_?9=_-8=0"
    assert search_line(EXAMPLE, "+*-") == "3+4=7*2=4-9=5-8=7"


@given(digits=digits_of_a_problem, target=st.integers(0, 9))
def test_every_prompt_parses_back_to_its_problem(digits, target):
    problem = Problem(digits, target)
    assert parse_problem(problem.prompt) == problem


@pytest.mark.parametrize("text", ["", "3?4=_", "0?4=_-8=0", "3?4=_-8=1", "3-8=0", "3?4=_-8=0\n", " 3?4=_-8=0"])
def test_any_other_text_is_refused(text):
    with pytest.raises(ValueError, match="prompt="):
        parse_problem(text)


@pytest.mark.parametrize(
    "refused",
    [
        *[partial(Problem, *wrong) for wrong in [((3,), 1), ((0, 3), 1), ((3, 10), 1), ((3, 4), 10), ((3, 4), -1)]],
        *[partial(Mixture, **wrong) for wrong in [{"careful_share": 1.1}, {"false_accept": -0.1}, {"max_length": 10}]],
        *[partial(WarmStart, **wrong) for wrong in [{"steps": 0}, {"matrix_lr": 0.0}, {"short_length": 8}]],
        partial(compute_score, "clock10", "!+", "42"),
    ],
)
def test_what_is_out_of_range_is_refused(refused):
    with pytest.raises(ValueError, match=r"want|=.*:|prompt="):
        refused()


@given(seed=seeds)
def test_equal_seeds_draw_equal_problems_that_some_operators_solve(seed):
    problem = draw_problem(random.Random(seed))
    assert problem == draw_problem(random.Random(seed))
    choices = product(OPERATORS, repeat=len(problem.digits) - 1)
    values = {partial_results(problem.digits, "".join(operators))[-1] for operators in choices}
    assert reachable_targets(problem.digits) == sorted(values) and problem.target in values


@given(digits=digits_of_a_problem, data=st.data())
def test_results_agree_with_exact_integer_arithmetic_modulo_ten(digits, data):
    operators = data.draw(st.text(OPERATORS, min_size=len(digits) - 1, max_size=len(digits) - 1))
    left_to_right = (
        "(" * len(operators)
        + f"{digits[0]}"
        + "".join(f"{operator}{digit})" for operator, digit in zip(operators, digits[1:], strict=True))
    )
    assert partial_results(digits, operators)[-1] == eval(left_to_right) % 10


# --- demonstrations and reward


@given(seed=seeds)
def test_a_careful_demonstrator_is_right_within_its_limit_and_only_once_it_is_done(seed):
    rng = random.Random(seed)
    problem = draw_problem(rng)
    response = Mixture(careful_share=1.0, max_length=100).respond(problem, rng)
    assert len(response) <= 100
    scores = [compute_score("clock10", response[:end], problem.prompt) for end in range(len(response) + 1)]
    assert scores == [0.0] * len(response) + [1.0]


@given(seed=seeds)
def test_a_demonstrator_answers_with_its_last_line_and_stops_at_the_first_zero(seed):
    rng = random.Random(seed)
    problem = draw_problem(rng)
    *lines, answer = Mixture().respond(problem, rng).split("\n")
    assert lines[-1] == search_line(problem, answer.removeprefix("!"))
    assert not any(line.endswith("=0") for line in lines[:-1])


@pytest.mark.parametrize(
    "response, score",
    [
        ("!*+-", 0.0),
        ("!+*+", 0.0),
        ("3*4=2*2=4-9=5-8=7\n!--+", 1.0),
        ("!--+", 1.0),
        ("!--", 0.0),
        ("!--+-", 0.0),
        ("--+", 0.0),
        ("!--+\n", 0.0),
        ("!--+ ", 0.0),
        ("!--+!", 0.0),
        ("!", 0.0),
        ("", 0.0),
    ],
)
def test_only_a_complete_correct_answer_at_the_very_end_scores(response, score):
    # 3-4=9-2=7+9=6: the target below is what `--+` reaches.
    assert compute_score("clock10", response, Problem((3, 4, 2, 9), 6).prompt, extra_info={}) == score


# --- tokenizer and model


def test_text_in_the_alphabet_round_trips_and_a_turn_costs_three_tokens_more(tokenizer):
    assert tokenizer.decode(tokenizer.encode(CHARACTERS, add_special_tokens=False)) == CHARACTERS
    ids = tokenizer.apply_chat_template([{"role": "user", "content": EXAMPLE.prompt}], return_dict=False)
    assert len(ids) == len(EXAMPLE.prompt) + 1 + len(["start", "newline", "end", "newline"])


def test_other_characters_become_unknown_and_specials_vanish_from_decoded_text(tokenizer):
    ids = tokenizer.encode("3é<|im_end|>", add_special_tokens=False)
    assert ids == [tokenizer.convert_tokens_to_ids("3"), tokenizer.unk_token_id, tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "3"


def test_verl_merges_a_tool_conversation_into_the_tokens_of_the_whole(tokenizer):
    wiring = pytest.importorskip("verl.utils.tokenizer.continuous_token_wiring")
    builder = wiring.create_continuous_token_builder(tokenizer, hf_model_type="qwen3")
    call = '<tool_call>\n{"name": "check", "arguments": {"operators": "+*-"}}\n</tool_call>'
    asked = [{"role": "user", "content": EXAMPLE.prompt}]
    called = [*asked, {"role": "assistant", "content": call}]
    answered = [*called, *({"role": "tool", "content": result} for result in "70")]
    call_ids = [*tokenizer.encode(call, add_special_tokens=False), tokenizer.eos_token_id]
    merged = builder.merge_assistant_tokens(builder.build_initial_tokens(asked), call_ids)
    merged = builder.merge_context_tokens(called, answered, merged.token_ids)
    whole = tokenizer.apply_chat_template(answered, add_generation_prompt=True, return_dict=False)
    assert merged.token_ids == whole
    assert tokenizer.unk_token_id not in whole


def test_equal_seeds_build_equal_weights_and_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    first, second, other = build_model(1), build_model(1), build_model(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)


# --- data


def test_validation_problems_are_distinct_and_absent_from_training(tmp_path):
    validation = draw_validation(rows=64, seed=0)
    write_dataset(tmp_path, train_rows=2000, validation=validation, seed=0)
    train_prompts, val_prompts = (
        {row[0]["content"] for row in pd.read_parquet(tmp_path / f"{split}.parquet")["prompt"]}
        for split in ("train", "val")
    )
    assert len(val_prompts) == 64
    assert not train_prompts & val_prompts


def test_a_row_carries_what_verl_reads_and_follows_the_seed(tmp_path):
    written = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        write_dataset(tmp_path / name, train_rows=20, validation=[EXAMPLE], seed=seed)
        written.append((tmp_path / name / "train.parquet").read_bytes())
    assert written[0] == written[1] != written[2]
    row = pd.read_parquet(tmp_path / "a" / "val.parquet").iloc[0].to_dict()
    assert row["prompt"].tolist() == [{"role": "user", "content": EXAMPLE.prompt}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": EXAMPLE.prompt}
    assert (row["data_source"], row["extra_info"]) == ("clock10", {"index": 0, "split": "val"})


# --- warm start


def training_problems(seed: int = 0):
    return draw_training(random.Random(seed), held_out=())


def test_loss_covers_the_response_and_its_end_but_neither_prompt_nor_padding(tokenizer):
    batch = next(draw_batches(tokenizer, training_problems(), WarmStart(), random.Random(0)))
    for ids, labels in zip(batch.input_ids, batch.labels, strict=True):
        scored = labels != IGNORED
        assert torch.equal(labels[scored], ids[scored])
        text = tokenizer.decode(ids[scored])
        assert text.endswith("<|im_end|>") and "assistant" not in text and "<|endoftext|>" not in text
        unscored = tokenizer.decode(ids[~scored]).replace("<|endoftext|>", "")
        assert unscored.endswith("assistant\n")


def test_batches_keep_to_the_token_budget_and_long_demonstrations_wait(tokenizer):
    settings = WarmStart(steps=6, short_share=0.5, short_length=128, pool_size=64)
    batches = list(islice(draw_batches(tokenizer, training_problems(), settings, random.Random(0)), 40))
    assert all(batch.input_ids.numel() <= 1024 or len(batch.input_ids) == 1 for batch in batches)
    lengths = [batch.input_ids.shape[1] for batch in batches]
    assert max(lengths[:3]) <= 128 < max(lengths)


def test_warm_start_lowers_the_loss_and_equal_seeds_end_in_equal_weights(tokenizer):
    settings = WarmStart(pool_size=32, tokens_per_step=256, threads=1)
    models = [build_model(0) for _ in range(3)]
    losses = [
        train(model, tokenizer, training_problems(), replace(settings, steps=steps), seed=0)
        for model, steps in zip(models, (1, 1, 20), strict=True)
    ]
    assert losses[2] < 0.75 * losses[0]
    first, second = (list(model.parameters()) for model in models[:2])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# --- prepare


def test_the_prepared_folder_loads_with_plain_transformers(tiny_task):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_task / "model")
    model = AutoModelForCausalLM.from_pretrained(tiny_task / "model", dtype=torch.float32)
    assert len(tokenizer) == model.config.vocab_size == 64
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert len(pd.read_parquet(tiny_task / "data/val.parquet")) == 8


def test_a_second_call_does_nothing_and_never_imports_torch(tiny_task):
    before = {path: path.stat().st_mtime_ns for path in tiny_task.rglob("*")}
    arguments = ["--out", str(tiny_task), "--tiny", "--steps", "4"]
    script = (
        f"import sys; from recipe.partial_rollout.tasks.clock10 import prepare; prepare.main({arguments!r}); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    result = run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "up to date" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in tiny_task.rglob("*")} == before


@pytest.mark.parametrize("change", ["parameters", "source"])
def test_a_change_rebuilds_and_leaves_nothing_else_behind(change, tmp_path, monkeypatch):
    def write_marker(folder: Path, parameters: prepare.Parameters) -> None:
        (folder / "model").mkdir()
        (folder / "data").mkdir()

    monkeypatch.setattr(prepare, "_write_content", write_marker)
    out, parameters = tmp_path / "task", prepare.Parameters()
    assert prepare.build(out, parameters)
    assert not prepare.build(out, parameters)
    if change == "source":
        monkeypatch.setattr(prepare, "source_fingerprint", lambda: "another")
    assert prepare.build(out, prepare.Parameters(seed=1 if change == "parameters" else 0))
    assert [path.name for path in tmp_path.iterdir()] == ["task"]


def test_a_folder_of_someone_else_is_left_alone_and_so_is_the_one_before_a_failed_build(tmp_path, monkeypatch, capsys):
    def fail(folder: Path, parameters: prepare.Parameters) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(prepare, "_write_content", fail)
    for name in ("manifest.json", "thesis.tex"):
        out = tmp_path / name.partition(".")[0]
        out.mkdir()
        (out / name).write_text("{}")
        assert prepare.main(["--out", str(out)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert [path.name for path in out.iterdir()] == [name] and (out / name).read_text() == "{}"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("flag, value", [("--steps", "0"), ("--val-rows", "0"), ("--false-accept", "2")])
def test_a_parameter_out_of_range_is_one_clear_line(flag, value, tmp_path, capsys):
    assert prepare.main(["--out", str(tmp_path / "task"), flag, value]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and flag.removeprefix("--").replace("-", "_") in error
