"""The embedded task: arithmetic, demonstrations, tokenizer, data, warm start and the command that builds them."""

import random
import sys
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from subprocess import run

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

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


def turns(*contents_by_role: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in contents_by_role]


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


@given(digits=digits_of_a_problem)
def test_reachable_targets_are_exactly_the_values_of_all_operator_choices(digits):
    values = {partial_results(digits, "".join(ops))[-1] for ops in product(OPERATORS, repeat=len(digits) - 1)}
    assert reachable_targets(digits) == sorted(values)


@given(digits=digits_of_a_problem, data=st.data())
def test_results_agree_with_exact_integer_arithmetic_modulo_ten(digits, data):
    operators = data.draw(st.text(OPERATORS, min_size=len(digits) - 1, max_size=len(digits) - 1))
    left_to_right = (
        "(" * len(operators)
        + f"{digits[0]}"
        + "".join(f"{operator}{digit})" for operator, digit in zip(operators, digits[1:], strict=True))
    )
    assert partial_results(digits, operators)[-1] == eval(left_to_right) % 10


@given(seed=seeds)
def test_equal_seeds_draw_equal_and_solvable_problems(seed):
    problem = draw_problem(random.Random(seed))
    assert problem == draw_problem(random.Random(seed))
    assert problem.target in reachable_targets(problem.digits)


@pytest.mark.parametrize("digits, target", [((3,), 1), ((0, 3), 1), ((3, 10), 1), ((3, 4), 10), ((3, 4), -1)])
def test_an_impossible_problem_is_refused(digits, target):
    with pytest.raises(ValueError, match="want"):
        Problem(digits, target)


# --- demonstrations and reward


@given(seed=seeds)
def test_a_careful_demonstrator_is_always_right(seed):
    rng = random.Random(seed)
    problem = draw_problem(rng)
    assert compute_score("clock10", Mixture(careful_share=1.0).respond(problem, rng), problem.prompt) == 1.0


@given(seed=seeds)
def test_a_demonstrator_answers_with_its_last_line_and_stops_at_the_first_zero(seed):
    rng = random.Random(seed)
    problem = draw_problem(rng)
    *lines, answer = Mixture().respond(problem, rng).split("\n")
    assert lines[-1] == search_line(problem, answer.removeprefix("!"))
    assert not any(line.endswith("=0") for line in lines[:-1])


def test_a_demonstrator_that_accepts_everything_writes_one_line():
    response = Mixture(careful_share=0.0, false_accept=1.0).respond(EXAMPLE, random.Random(0))
    assert response.count("\n") == 1


def test_demonstrations_keep_to_the_length_limit():
    mixture, rng = Mixture(careful_share=1.0, max_length=100), random.Random(0)
    assert all(len(mixture.respond(draw_problem(rng), rng)) <= 100 for _ in range(200))


@pytest.mark.parametrize("broken", [{"careful_share": 1.1}, {"false_accept": -0.1}, {"max_length": 10}])
def test_a_mixture_out_of_range_is_refused(broken):
    with pytest.raises(ValueError, match=next(iter(broken))):
        Mixture(**broken)


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


def test_every_truncation_of_a_correct_response_scores_zero():
    rng = random.Random(0)
    response = Mixture(careful_share=1.0).respond(EXAMPLE, rng)
    scores = [compute_score("clock10", response[:cut], EXAMPLE.prompt) for cut in range(len(response))]
    assert not any(scores)


def test_a_ground_truth_that_is_no_problem_is_a_fault_of_the_data():
    with pytest.raises(ValueError, match="prompt="):
        compute_score("clock10", "!+", "42")


# --- tokenizer and model


def test_the_tokenizer_is_exactly_as_large_as_the_model(tokenizer):
    model = build_model(seed=0)
    assert len(tokenizer) == model.config.vocab_size == model.get_input_embeddings().num_embeddings == 64


@given(text=st.text(st.sampled_from(CHARACTERS)))
def test_text_in_the_alphabet_round_trips(text):
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_other_characters_become_unknown_and_specials_vanish_from_decoded_text(tokenizer):
    ids = tokenizer.encode("3é<|im_end|>", add_special_tokens=False)
    assert ids == [tokenizer.convert_tokens_to_ids("3"), tokenizer.unk_token_id, tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "3"


def test_a_turn_costs_three_tokens_beyond_its_role_and_text(tokenizer):
    ids = tokenizer.apply_chat_template(turns(("user", EXAMPLE.prompt)), return_dict=False)
    assert len(ids) == len(EXAMPLE.prompt) + 1 + len(["start", "newline", "end", "newline"])


def test_verl_merges_a_tool_conversation_into_the_tokens_of_the_whole(tokenizer):
    wiring = pytest.importorskip("verl.utils.tokenizer.continuous_token_wiring")
    builder = wiring.create_continuous_token_builder(tokenizer, hf_model_type="qwen3")
    call = '<tool_call>\n{"name": "check", "arguments": {"operators": "+*-"}}\n</tool_call>'
    asked = turns(("user", EXAMPLE.prompt))
    called = asked + turns(("assistant", call))
    answered = called + turns(("tool", "7"), ("tool", "0"))
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


def test_a_row_carries_what_verl_reads(tmp_path):
    write_dataset(tmp_path, train_rows=3, validation=[EXAMPLE], seed=0)
    row = pd.read_parquet(tmp_path / "val.parquet").iloc[0].to_dict()
    assert row["prompt"].tolist() == [{"role": "user", "content": EXAMPLE.prompt}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": EXAMPLE.prompt}
    assert (row["data_source"], row["extra_info"]) == ("clock10", {"index": 0, "split": "val"})


def test_data_follows_the_seed(tmp_path):
    prompts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        write_dataset(tmp_path / name, train_rows=20, validation=draw_validation(4, seed), seed=seed)
        prompts.append((tmp_path / name / "train.parquet").read_bytes())
    assert prompts[0] == prompts[1] != prompts[2]


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


def test_batches_keep_to_the_token_budget_unless_one_sequence_exceeds_it(tokenizer):
    batches = draw_batches(tokenizer, training_problems(), WarmStart(pool_size=128), random.Random(0))
    for batch in islice(batches, 40):
        assert batch.input_ids.numel() <= 1024 or len(batch.input_ids) == 1


def test_long_demonstrations_wait_until_the_short_phase_is_over(tokenizer):
    settings = WarmStart(steps=6, short_share=0.5, short_length=128, pool_size=64)
    lengths = [
        batch.input_ids.shape[1]
        for batch in islice(draw_batches(tokenizer, training_problems(), settings, random.Random(0)), 40)
    ]
    assert max(lengths[:3]) <= 128 < max(lengths)


@pytest.mark.parametrize("broken", [{"steps": 0}, {"matrix_lr": 0.0}, {"short_share": 1.5}, {"short_length": 8}])
def test_a_warm_start_out_of_range_is_refused(broken):
    with pytest.raises(ValueError, match=next(iter(broken))):
        WarmStart(**broken)


def test_the_learning_rate_holds_for_half_the_steps_and_then_falls_to_zero():
    settings = WarmStart(steps=10)
    assert [settings.lr_scale(step) for step in (0, 5, 6, 9)] == [1.0, 1.0, 0.8, 0.2]


def test_warm_starts_with_equal_seeds_end_in_equal_weights(tokenizer):
    settings = WarmStart(steps=3, pool_size=32, threads=1)
    models = [build_model(0) for _ in range(2)]
    for model in models:
        train(model, tokenizer, training_problems(), settings, seed=0)
    first, second = (list(model.parameters()) for model in models)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_warm_start_multiplies_nothing_in_bfloat16(tokenizer):
    """Without bfloat16 instructions it would take five times as long."""
    products = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name in ("aten::mm", "aten::addmm"):
                products.append(args[-1].dtype)
            return func(*args, **(kwargs or {}))

    with Watch():
        train(build_model(0), tokenizer, training_problems(), WarmStart(steps=1, pool_size=32, threads=1), seed=0)
    # Two products of each of Muon's five iterations, and one more, for each of 21 matrices, among the model's own.
    assert len(products) > 300
    assert set(products) == {torch.float32}


def test_warm_start_lowers_the_loss(tokenizer):
    settings = WarmStart(pool_size=32, tokens_per_step=256, threads=1)
    losses = [
        train(build_model(0), tokenizer, training_problems(), replace(settings, steps=steps), seed=0)
        for steps in (1, 20)
    ]
    assert losses[1] < 0.75 * losses[0]


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


def test_a_failed_build_keeps_the_previous_folder(tmp_path, monkeypatch):
    def fail(folder: Path, parameters: prepare.Parameters) -> None:
        raise OSError("disk full")

    out = tmp_path / "task"
    out.mkdir()
    (out / "manifest.json").write_text("{}")
    monkeypatch.setattr(prepare, "_write_content", fail)
    assert prepare.main(["--out", str(out)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["task"]
    assert (out / "manifest.json").read_text() == "{}"


def test_a_folder_of_someone_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("precious")
    assert prepare.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert (tmp_path / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("flag, value", [("--steps", "0"), ("--val-rows", "0"), ("--false-accept", "2")])
def test_a_parameter_out_of_range_is_one_clear_line(flag, value, tmp_path, capsys):
    assert prepare.main(["--out", str(tmp_path / "task"), flag, value]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and flag.removeprefix("--").replace("-", "_") in error
