"""The task of images: its rows, its model and what ships, without an engine.

Its other facts are frozen as clock10's are (``test_ready_start``).
"""

import random
import re
from itertools import islice

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from recipe.partial_rollout.tasks import ready_start
from recipe.partial_rollout.tasks.clock10.dataset import draw_validation
from recipe.partial_rollout.tasks.clock10.expression import draw_problem
from recipe.partial_rollout.tasks.clock10.reward import compute_score
from recipe.partial_rollout.tasks.pictures import model as architecture
from recipe.partial_rollout.tasks.pictures.dataset import to_row, write_dataset
from recipe.partial_rollout.tasks.pictures.picture import COLOURS, draw, encoded, opened
from recipe.partial_rollout.tasks.pictures.tokenizer import IMAGE, VOCABULARY, build_tokenizer
from recipe.partial_rollout.tasks.pictures.warm_start import IGNORED, PLACEHOLDERS, TOKENS, draw_batches, take_language

DIGITS = VOCABULARY.index("0")


def problems(seed):
    rng = random.Random(seed)
    while True:
        yield draw_problem(rng)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The task's model as it ships."""
    folder = tmp_path_factory.mktemp("pictures") / "task"
    made = ready_start.make_task(folder, ready_start.Parameters(), task="pictures")
    assert made == "unpacked from the package"
    return Qwen3VLForConditionalGeneration.from_pretrained(folder / "model").eval()


def test_row_has_a_picture_in_place_of_the_target(tmp_path):
    validation = draw_validation(4, 0)
    write_dataset(tmp_path, 12, validation, 0)
    train, val = (pd.read_parquet(tmp_path / f"{split}.parquet").to_dict("records") for split in ("train", "val"))
    assert (len(train), len(val)) == (12, 4)
    for row in train + val:
        (asked,), (image,) = row["prompt"], row["images"]
        truth = row["reward_model"]["ground_truth"]
        assert asked["content"].replace("<image>", truth[-3]) == truth and opened(image["bytes"]).size == (64, 64)
        assert compute_score("clock10", "!+", truth) in (0.0, 1.0)
    again = [to_row(problem, index, "val", 0) for index, problem in enumerate(validation)]
    assert [row["images"][0]["bytes"] for row in again] == [row["images"][0]["bytes"] for row in val]


def test_pictures_of_a_target_differ_and_no_two_targets_share_one():
    drawn = [{encoded(draw(target, random.Random(seed))) for seed in range(80)} for target in range(10)]
    # No squares leave the ground alone, which is not black, the colour of 0.
    assert len(drawn[0]) == 5 and all(len(pictures) > 10 for pictures in drawn[1:])
    assert len(set().union(*drawn)) == sum(map(len, drawn)) and len(set(COLOURS)) == 10


def test_warm_start_asks_as_verl_does():
    """verl renders a message of parts, and its processor repeats the placeholder for each token of the picture."""
    tokenizer = build_tokenizer()
    inputs, labels = next(draw_batches(tokenizer, problems(0), 0))
    shown = tokenizer.decode(inputs["input_ids"][0][labels[0].eq(IGNORED)], skip_special_tokens=True).split("\n")[1]
    assert re.fullmatch(r"[1-9](\?[1-9]=_)+-=0", shown)
    parts = [{"type": "text", "text": shown[:-2]}, {"type": "image"}, {"type": "text", "text": shown[-2:]}]
    messages = [{"role": "user", "content": parts}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    asked = tokenizer.encode(text.replace(IMAGE, IMAGE * TOKENS), add_special_tokens=False)
    assert inputs["input_ids"][0, : len(asked)].tolist() == asked
    assert (labels[0, : len(asked)] == IGNORED).all() and labels[0, len(asked)] != IGNORED
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 4]] * len(labels)
    assert tokenizer.decode(asked, skip_special_tokens=True) == f"user\n{shown}\nassistant\n"


def test_processor_that_is_saved_is_the_warm_starts(tmp_path):
    architecture.save_processor(tmp_path)
    rng = random.Random("warm-start-0")
    inputs, _ = next(draw_batches(build_tokenizer(), problems(0), 0))
    saved = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    assert saved([draw(3, rng)], return_tensors="pt")["pixel_values"].shape[1:] == inputs["pixel_values"].shape[1:]
    white = encoded(draw(9, random.Random(0)))
    assert saved([opened(white)], return_tensors="pt")["pixel_values"].abs().max() <= 1


def test_language_part_begins_as_clock10s_model(tmp_path):
    ready_start.make_task(tmp_path / "task", ready_start.Parameters())
    clock10 = AutoModelForCausalLM.from_pretrained(tmp_path / "task" / "model").eval()
    ours = architecture.build_model(0).eval()
    take_language(ours)
    ids = build_tokenizer().encode("<|im_start|>user\n3?4=_?2=_-8=0", add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=ids).logits, clock10(input_ids=ids).logits, atol=1e-4, rtol=0)


def test_warm_start_reads_pictures_and_says_no_placeholder(model):
    """Else an engine, which never samples a placeholder, has other log-probs than the trainer."""
    batches = draw_batches(build_tokenizer(), problems("held out"), 1)
    right, digits, minus, equals, newline = [], slice(DIGITS, DIGITS + 10), *map(VOCABULARY.index, "-=\n")
    for inputs, labels in islice(batches, 4):
        with torch.no_grad():
            log_probs = model(**inputs).logits.log_softmax(-1)
        assert log_probs[:, :-1][labels[:, 1:] != IGNORED][:, PLACEHOLDERS].max() < -15
        # The end of a line, such as `-8=7`, says the target.
        ends = (labels[:, :-4] == minus) & (labels[:, 2:-2] == equals) & (labels[:, 4:] == newline)
        read = log_probs[:, :-4, digits].argmax(-1) + DIGITS
        right.append((read == labels[:, 1:-3])[ends])
    assert len(torch.cat(right)) > 100 and torch.cat(right).float().mean() > 0.8


def test_warm_start_copies_the_operands_of_a_problem_with_a_picture(model):
    """A picture has six tokens where clock10's text has one, so what is copied lies at other distances."""
    tokenizer, copied = build_tokenizer(), []
    for inputs, labels in islice(draw_batches(tokenizer, problems("others"), 1), 8):
        own = {"pixel_values": inputs["pixel_values"][:16], "image_grid_thw": inputs["image_grid_thw"][:1]}
        asked = inputs["input_ids"][:1, : int(labels[0].ne(IGNORED).float().argmax())]
        prompt = tokenizer.decode(asked[0], skip_special_tokens=True)
        types = (asked == VOCABULARY.index(IMAGE)).int()
        made = model.generate(input_ids=asked, mm_token_type_ids=types, **own, max_new_tokens=24, do_sample=False)
        line = tokenizer.decode(made[0, asked.shape[1] :], skip_special_tokens=True).split("\n")[0]
        copied.append([line[0], *re.findall(r"[+*-](\d)=", line)[:-1]] == re.findall(r"[1-9]", prompt))
    assert sum(copied) >= 6
