"""The warm start that ships: it fits the sources, unpacks to what a training leaves, and is refused where it does not.

What else of ``clock10`` could change unseen is its tokenizer, with transformers.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from recipe.partial_rollout.tasks import ready_start
from recipe.partial_rollout.tasks.clock10.expression import Problem
from recipe.partial_rollout.tasks.clock10.tokenizer import CHARACTERS, build_tokenizer
from tests import generated

TINY = ready_start.Parameters(steps=4, train_rows=32, val_rows=8)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder whose weights were trained."""
    folder = tmp_path_factory.mktemp("trained") / "task"
    assert ready_start.make_task(folder, TINY, train=True) == "trained"
    return folder


@pytest.fixture(scope="module")
def packed(trained, tmp_path_factory):
    """That folder's package file, and its largest error."""
    file = tmp_path_factory.mktemp("packed") / "start.npz"
    return file, generated.pack(trained, file)


@pytest.fixture
def builds(monkeypatch):
    """Parameters of the folders that were trained; nothing trains."""
    seen, write = [], ready_start._write

    def note(folder, task, parameters, weights):
        return seen.append(parameters) if weights is None else write(folder, task, parameters, weights)

    monkeypatch.setattr(ready_start, "_write", note)
    return seen


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("task", ready_start.TASKS)
def test_file_that_ships_fits_the_sources_and_the_model(task):
    weights, manifest, error = ready_start.read_packed(ready_start.packed_file(task))
    command = f"python -m {ready_start.__name__} --task {task}"
    packs = f"python -m tests.generated warm_start {task} FOLDER"
    wanted = ready_start.manifest_of(task, ready_start.Parameters())
    assert manifest == wanted, f"packed of other sources: {command} --train --out FOLDER, then {packs}"
    state = ready_start._module(task, "model").build_model(0).state_dict()
    wanted = {name: tuple(weight.shape) for name, weight in state.items() if "lm_head" not in name}
    assert {name: weight.shape for name, weight in weights.items()} == wanted
    # A model that sees has a tower, and rows of placeholders, which are large.
    size, most = (1_000_000, 0.015) if task == "pictures" else (700_000, 0.005)
    assert ready_start.packed_file(task).stat().st_size < size and 0 < error < most


@given(st.lists(st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3), min_size=1, max_size=4))
@example([[0.0, 0.0, 4.3860641933366774e-43]])
def test_no_weight_is_off_by_more_than_half_a_level(rows):
    weight = np.array(rows, np.float32)
    levels, scale = generated.quantise(weight)
    assert levels.dtype == np.int8 and scale.shape == (len(rows), 1)
    assert (np.abs(levels * scale - weight) <= scale * 0.5001).all()


def test_unpacked_folder_is_the_trained_one_but_for_the_stated_error(trained, packed, tmp_path):
    (file, error), made = packed, tmp_path / "task"
    made.mkdir()
    # Weights of older sources are replaced.
    (made / "manifest.json").write_text('{"fingerprint": "older"}')
    assert ready_start.make_task(made, TINY, file=file) == "unpacked from the package"
    assert ready_start.make_task(made, TINY, file=file) == "up to date"
    before, after = files(trained), files(made)
    assert after.keys() - before.keys() == {"ready_start.json"}
    assert {name for name in before if before[name] != after[name]} == {"model/model.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["task"]
    before, after = (load_file(folder / "model/model.safetensors") for folder in (trained, made))
    assert max(np.abs(before[name] - after[name]).max() for name in before) == pytest.approx(error)
    assert all((before[name] == after[name]).all() for name in before if before[name].ndim == 1), "norms"
    assert json.loads((made / "ready_start.json").read_text())["largest_weight_error"] == pytest.approx(error)


@pytest.mark.parametrize(("sources", "steps"), [("another", 4), (ready_start.source_fingerprint("clock10"), 5)])
def test_file_that_does_not_fit_is_refused_and_a_warm_start_trained(
    sources, steps, packed, tmp_path, monkeypatch, builds, capsys
):
    monkeypatch.setattr(ready_start, "source_fingerprint", lambda task: sources)
    parameters = replace(TINY, steps=steps)
    assert ready_start.make_task(tmp_path / "task", parameters, file=packed[0]) == "trained"
    assert builds == [parameters] and capsys.readouterr().err.count("\n") == 1


def test_unpacked_weights_are_not_packed_again_and_give_way_to_training(packed, tmp_path, builds):
    ready_start.make_task(tmp_path / "task", TINY, file=packed[0])
    with pytest.raises(ValueError, match="its weights were unpacked, not trained"):
        generated.pack(tmp_path / "task", tmp_path / "file.npz")
    assert ready_start.make_task(tmp_path / "task", TINY, file=packed[0], train=True) == "trained"
    assert builds == [TINY] and not (tmp_path / "task" / "ready_start.json").exists()


@pytest.mark.parametrize("manifest", [None, '{"name": "mine"}', "[]"])
def test_folder_of_someone_else_is_left_alone(tmp_path, capsys, manifest):
    (tmp_path / "thesis.tex").write_text("precious")
    if manifest:
        (tmp_path / "manifest.json").write_text(manifest)
    assert ready_start.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and (tmp_path / "thesis.tex").read_text() == "precious"


def test_text_in_the_alphabet_round_trips_and_a_turn_costs_three_tokens():
    tokenizer, prompt = build_tokenizer(), Problem((3, 4, 2, 9), 8).prompt
    assert tokenizer.decode(tokenizer.encode(CHARACTERS, add_special_tokens=False)) == CHARACTERS
    other = tokenizer.encode("3é<|im_end|>", add_special_tokens=False)
    assert other == [tokenizer.convert_tokens_to_ids("3"), tokenizer.unk_token_id, tokenizer.eos_token_id]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], return_dict=False)
    assert len(ids) == len(prompt) + 1 + len(["start", "newline", "end", "newline"])
