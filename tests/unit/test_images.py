"""Images of rows: as bytes while a prompt is in flight, the same for both arms, and one copy of their pixels a group."""

import asyncio
import io
import pickle
from copy import copy, deepcopy
from dataclasses import replace
from types import SimpleNamespace

import datasets
import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image, ImageOps
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.schemas import ToolResponse
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.model import extract_multi_modal_inputs
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder
from verl.utils.tokenizer.tokenizer import get_processor_token_id

from recipe.partial_rollout.checkpoint.plain_state import pack, unpack
from recipe.partial_rollout.checkpoint.row_images import closed_row, digest, opened_row, png
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.manager.policies import masked_output
from recipe.partial_rollout.manager.types import Segment, TakenGroup
from recipe.partial_rollout.preflight.rows import check_left_out, check_rows, dataset_of, file_rows
from recipe.partial_rollout.preflight.verl_keys import check_verl_keys
from recipe.partial_rollout.records.run_log import prompt_identity
from recipe.partial_rollout.training.agent_loop_manager import assemble_batch
from recipe.partial_rollout.training.batch_images import add_images
from recipe.partial_rollout.worker.agent_loop_worker import sample_output
from recipe.partial_rollout.worker.llm_client import PartialRolloutLLMClient, SampleClient
from recipe.partial_rollout.worker.pictures import Pictures, images_in, kept
from tests.tiny_vlm import VISION, build, file_of, picture, row
from tests.unit.loop_life import function
from tests.unit.shared import Claims, live_sample, settings_of
from tests.unit.test_turn_alignment import Call, config_of


def opened(*images, file=True, text="?"):
    """A row as verl's dataset gives it: one list of messages in two columns, with opened images."""
    parts = []
    for image in images:
        parts.append({"type": "image", "image": image})
        if file:
            data = file_of(image)
            parts[-1] |= {"image": Image.open(io.BytesIO(data)), "bytes": data, "path": None}
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return {"prompt": messages, "raw_prompt": messages, "index": 3, "data_source": "colours"}


def shown(row):
    return [part["image"] for part in row["raw_prompt"][0]["content"] if part["type"] == "image"]


@pytest.mark.parametrize("file", [True, False])
def test_row_is_saved_and_sent_as_files_with_the_same_pixels_and_identity(file):
    row = opened(picture("r"), picture("g", 96), file=file)
    shut = closed_row(row)
    assert len(pickle.dumps(shut)) < 1500 < len(pickle.dumps(row))
    back = opened_row(unpack(pack(shut)))
    assert [digest(image) for image in shown(back)] == [digest(picture("r")), digest(picture("g", 96))]
    assert back["prompt"] is back["raw_prompt"] and back["index"] == 3
    # What is in flight stays closed, and the dataset's own row opened.
    assert "image" not in shut["raw_prompt"][0]["content"][0] and len(shown(row)) == 2
    assert prompt_identity(row) == prompt_identity(deepcopy(row)) == prompt_identity(shut)
    assert prompt_identity(row) != prompt_identity(opened(picture("r"), picture("b", 96), file=file))


def inverted(image):
    return ImageOps.invert(image.convert("RGB"))


def draws(image):
    image.paste((255, 0, 0), (0, 0, 8, 8))
    return image


CHANGES = {
    "none": (lambda image: image, "PNG", True),
    "none, and its pixels were read": (lambda image: image.load() and image, "WEBP", True),
    "another image": (inverted, "PNG", False),
    "the file's own object": (draws, "PNG", False),
    "a smaller draft": (lambda image: image.draft("RGB", (8, 8)) and image, "JPEG", False),
    "another frame": (lambda image: image.seek(1) or image, "GIF", False),
}


@pytest.mark.parametrize(("change", "kind", "same"), CHANGES.values(), ids=CHANGES)
def test_row_is_closed_as_its_dataset_class_left_it(change, kind, same):
    """verl's keeps the file beside the image, and a class of one's own may change the image."""
    data = io.BytesIO()
    picture("b").save(data, kind, **({"save_all": True, "append_images": [picture("g")]} if kind == "GIF" else {}))
    part = {"type": "image", "bytes": data.getvalue(), "image": change(Image.open(data))}
    shut = closed_row({"raw_prompt": [{"role": "user", "content": [part]}]})
    (back,), (closed_part,) = shown(opened_row(shut)), shut["raw_prompt"][0]["content"]
    assert back.size == part["image"].size and back.convert("RGB").tobytes() == part["image"].convert("RGB").tobytes()
    assert (closed_part["bytes"] == data.getvalue()) == same


ALL_MODES = ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB", "HSV", "I", "I;16", "F"]


def in_mode(image, mode):
    """``image`` in any of Pillow's modes, by way of one from which it converts."""
    steps = {"PA": "LA", "RGBa": "RGBA", "I;16": "I"}
    return image.convert(steps.get(mode, "RGB")).convert(mode)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_image_of_any_mode_is_closed_with_the_pixels_that_models_see(mode):
    image = in_mode(Image.radial_gradient("L"), mode)
    (back,) = shown(opened_row(closed_row(opened(image, file=False))))
    # As verl's, vLLM's and the processors' code.
    assert back.convert("RGB").tobytes() == image.convert("RGB").tobytes()
    assert png(back) == png(image)


def test_digest_tells_modes_and_palettes_apart():
    flat = [Image.new(mode, (4, 4)) for mode in ("RGB", "HSV", "LAB", "YCbCr", "RGBA", "CMYK")]
    palettes = [Image.new("P", (4, 4)) for _ in range(2)]
    palettes[0].putpalette([255, 0, 0])
    palettes[1].putpalette([0, 0, 255])
    marks = [digest(image) for image in [*flat, *palettes]]
    assert len({*marks}) == len(marks)
    assert digest(np.asarray(flat[0])) == marks[0], "an engine takes arrays, too"


def test_row_without_images_stays_the_same_object():
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    row = {"raw_prompt": messages}
    assert closed_row(row) is row and opened_row(row) is row
    assert closed_row({}) == {} and closed_row({"raw_prompt": "text"}) == {"raw_prompt": "text"}


# -- with a model that sees ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def vlm(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    build(request.param, path)
    processor, tokenizer = hf_processor(str(path)), hf_tokenizer(str(path))
    assert processor is not None, "torchvision is missing, or does not import"
    data = OmegaConf.create({"custom_cls": {"path": None}, "mm_processor_kwargs": {}})
    builder = create_continuous_token_builder(
        tokenizer, hf_model_type=request.param, chat_template_kwargs={}, mm_processor_kwargs={}, processor=processor
    )
    pictures = Pictures(OmegaConf.create({"data": data}), tokenizer, processor, RLHFDataset)
    pad = tokenizer.pad_token_id
    return SimpleNamespace(path=path, kind=request.param, pictures=pictures, builder=builder, pad=pad)


def prompt_of(vlm, row):
    images = asyncio.run(vlm.pictures.of_row(row))
    return np.array(vlm.builder.build_initial_tokens(opened_row(row)["raw_prompt"], images=images or None), np.int32)


def group_of(vlm, output, number, row, lengths, images):
    made = [replace(output(length), prompt_ids=prompt_of(vlm, row), images=images) for length in lengths]
    return TakenGroup(f"0/{number}", number, closed_row(row), tuple(made))


@pytest.fixture
def batch(vlm, output):
    """Three prompts: with one image, with two and a sample that failed, and without."""
    blind = {"raw_prompt": [{"role": "user", "content": "a?"}], "data_source": "colours"}
    groups = [
        group_of(vlm, output, 0, opened(picture("r")), (3, 5), (0,)),
        group_of(vlm, output, 1, opened(picture("g", 96), picture("b", 64, 128)), (4, 2), (0, 1)),
        group_of(vlm, output, 2, blind, (6, 1), ()),
    ]
    made = Segment(np.arange(2, dtype=np.int32) + 20, np.zeros(2, np.float32), 0)
    groups[1] = replace(groups[1], outputs=(*groups[1].outputs, masked_output([made], "its tool raised")))
    data = assemble_batch(groups, ["a", "b", "c"], 48, 8, vlm.pad)
    asyncio.run(add_images(data, groups, vlm.pictures))
    return data


def test_padded_batch_is_to_the_model_what_each_sample_is_alone(vlm, batch):
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(vlm.path, dtype=torch.float32, attn_implementation="sdpa")
    tensors, columns = batch.batch, batch.non_tensor_batch["multi_modal_inputs"]
    assert tensors["position_ids"].shape == (7, 4, 56)
    assert [len(each) > 0 for each in columns] == [True] * 4 + [False] * 3

    def log_probs(rows, where):
        inputs = extract_multi_modal_inputs(columns[rows])
        inputs.pop("images_seqlens", None)
        taken = {key: tensors[key][rows][..., where] for key in ("input_ids", "attention_mask", "position_ids")}
        taken["position_ids"] = taken["position_ids"].transpose(0, 1)
        with torch.no_grad():
            # Without those that ``tiny_vlm`` makes improbable.
            return model.eval()(**taken, **inputs, use_cache=False).logits.log_softmax(-1)[..., : -len(VISION)]

    whole = log_probs(list(range(7)), torch.ones(56, dtype=torch.bool))
    for i in range(7):
        where = tensors["attention_mask"][i].bool()
        torch.testing.assert_close(whole[i][where], log_probs([i], where)[0], atol=1e-6, rtol=0)


def test_siblings_share_their_pixels_and_so_does_what_is_sent(batch):
    inputs = batch.non_tensor_batch["multi_modal_inputs"]
    assert inputs[0] is inputs[1] and inputs[2] is inputs[3] and inputs[0] is not inputs[2]
    pixels = inputs[0]["pixel_values"].nbytes + inputs[2]["pixel_values"].nbytes
    assert pixels < len(pickle.dumps(batch.non_tensor_batch)) < 1.5 * pixels


def test_sample_keeps_its_rows_images_by_place_and_others_as_files(vlm):
    row = closed_row(opened(picture("r"), picture("g")))
    own = asyncio.run(vlm.pictures.of_row(row))
    images = [own[1], picture("b", 80), own[0]]
    assert kept(images, [digest(image) for image in images], own) == (1, png(picture("b", 80)), 0)


def test_sample_with_too_few_tokens_for_its_images_fails_by_itself(vlm, output):
    row = opened(picture("r"), picture("g"))
    sample, own = replace(output(3), prompt_ids=prompt_of(vlm, row)), asyncio.run(vlm.pictures.of_row(row))
    vlm.pictures.check(sample, own)
    for images in (own[:1], [*own, picture("b")]):
        with pytest.raises(RuntimeError, match="tokens of the sample stand for images"):
            vlm.pictures.check(sample, images)
    more = replace(sample, response_ids=np.array([20, get_processor_token_id(vlm.pictures.processor, "video"), 2]))
    with pytest.raises(RuntimeError, match="1 tokens of the sample stand for a video"):
        vlm.pictures.check(more, own)


def test_images_that_a_loop_had_processed_in_another_way_fail_its_sample(vlm, output):
    """The trainer would process them as the configuration says."""
    row = opened(picture("r"))
    sample, own = replace(output(3), prompt_ids=prompt_of(vlm, row)), asyncio.run(vlm.pictures.of_row(row))
    vlm.pictures.check(sample, own, {})
    said = r"mm_processor_kwargs=.*do_normalize.* beside the images of the sample: .*data\.mm_processor_kwargs=\{\}"
    with pytest.raises(ValueError, match=said):
        vlm.pictures.check(sample, own, {"do_normalize": False})


@pytest.mark.parametrize(("given", "said"), [({"videos": ["v"]}, "videos"), ({"images": ["a.png"]}, "not PIL.Image")])
def test_media_that_are_not_trained_are_named(given, said):
    output = AgentLoopOutput(
        prompt_ids=[1], response_ids=[], response_mask=[], multi_modal_data=given, metrics=AgentLoopMetrics()
    )
    with pytest.raises(ValueError, match=f"0/0#0 shows .*{said}.*partial_rollout.enable=False"):
        images_in(output, "0/0#0")
    output.multi_modal_data = {"images": [picture("r")], "videos": None, "audios": []}
    assert len(images_in(output, "0/0#0")) == 1
    for images in (picture("r"), (picture("r"),)):
        output.multi_modal_data = {"images": images}
        assert len(images_in(output, "0/0#0")) == 1


# -- before Ray starts ---------------------------------------------------------------------------------------------------


@pytest.fixture
def check(vlm, tmp_path, resolved_config, monkeypatch):
    """``check(rows, *overrides, processor=, enable=)``: what a start checks of a file with these rows; its dataset."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def run(rows, *overrides, processor=vlm.pictures.processor, enable=True):
        file = tmp_path / "rows.parquet"
        pd.DataFrame(rows).to_parquet(file)
        given = f"data.train_files={file}", f"data.val_files={file}", "data.max_prompt_length=64", "trainer.save_freq=5"
        config = resolved_config("quickstart_cpu", *given, *overrides)
        dataset = dataset_of(config, "train", vlm.pictures.tokenizer, processor)
        check_rows(config, settings_of(enable=enable), dataset, "data.train_files", processor)
        return dataset

    return run


UNFILTERED = "data.filter_overlong_prompts=False"


def test_prompts_count_the_tokens_of_their_images(check):
    rows = [row(0, "r"), row(1, "g", 1024), row(2, "bw")]
    assert [*file_rows(check(rows))] == [0, 2]
    with pytest.raises(ConfigError, match=r"^data\.train_files=.*row 1 is not .*its prompt has [78]\d tokens"):
        check(rows, UNFILTERED)


def test_images_whose_batch_does_not_fit_are_refused(check, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    with pytest.raises(ConfigError, match=r"^data\.train_files=.*the images of a batch need .* 0.0 GiB are free"):
        check([row(0, "r", 128)] * 3, UNFILTERED, "data.max_prompt_length=512")


def test_other_media_and_models_are_refused_under_partial_rollout_alone(check, vlm):
    film = {key: value for key, value in row(0, "r").items() if key != "images"}
    film |= {"prompt": [{"role": "user", "content": "<video>?"}], "videos": [{"video": "a.mp4"}]}
    other = copy(vlm.pictures.processor)
    del other.get_rope_index
    for words, rows, processor in (
        (r"^data\.train_files=.*row 0 has video", [film], vlm.pictures.processor),
        (r"^actor_rollout_ref\.model\.path=.*Qwen3-VL, GLM-4.1V", [row(0, "r")], other),
    ):
        with pytest.raises(ConfigError, match=words):
            check(rows, UNFILTERED, processor=processor)
        assert len(check(rows, UNFILTERED, processor=processor, enable=False)) == 1


def test_rows_that_verls_filter_leaves_out_by_a_mistake_of_its_own_are_refused(
    vlm, tmp_path, resolved_config, monkeypatch
):
    """Its worker processes do not have what a class of one's own inherits."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    file, own = tmp_path / "rows.parquet", tmp_path / "own.py"
    pd.DataFrame([row(i, "r") for i in range(2)]).to_parquet(file)
    own.write_text("from verl.utils.dataset.rl_dataset import RLHFDataset\n\nclass Own(RLHFDataset):\n    pass\n")
    given = f"data.train_files={file}", f"data.custom_cls.path={own}", "data.custom_cls.name=Own"
    config = resolved_config("quickstart_cpu", *given, "data.max_prompt_length=64")
    parts = config, "train", vlm.pictures.tokenizer, vlm.pictures.processor
    without = {"filter_overlong_prompts_workers": None}
    check_verl_keys(resolved_config("quickstart_cpu", "data.filter_overlong_prompts_workers=null"))
    assert len(dataset_of(*parts, **without)) == 2
    dataset = dataset_of(*parts)
    assert len(dataset) == 0
    with pytest.raises(ConfigError, match=r"^data\.filter_overlong_prompts_workers=1: null .*data\.custom_cls"):
        check_left_out(config, dataset, "train", *parts[2:])


def test_image_that_cannot_be_saved_is_refused_by_its_row(vlm, resolved_config):
    """Of a loop of the user's own, for whose rows no pixels are made before."""
    own = "trainer.save_freq=5", "actor_rollout_ref.rollout.agent.default_agent_loop=mine"
    rows = [opened(picture("r"), file=False), opened(picture("r").convert("LA").convert("La"), file=False)]
    config, processor = resolved_config("quickstart_cpu", *own), vlm.pictures.processor
    with pytest.raises(ConfigError, match=r"^data\.train_files=.*; row 1 has an image .*conversion from La"):
        check_rows(config, settings_of(enable=True), rows, "data.train_files", processor)


def test_package_that_reads_images_is_named_before_every_row_is_left_out(check, monkeypatch):
    monkeypatch.setattr("recipe.partial_rollout.preflight.rows.is_installed", lambda name: False)
    with pytest.raises(ConfigError, match=r"^data\.train_files=.*the package qwen_vl_utils; it is not installed"):
        check([row(0, "r")])


# -- tools that return images --------------------------------------------------------------------------------------------


ZOOM, SAY, END = 20, 21, 2
"""a first token that calls the tool, one that does not, and the end of a turn"""


@ToolParser.register("zoom")
class ZoomParser(ToolParser):
    """An answer that begins with ``ZOOM`` calls ``zoom``."""

    async def extract_tool_calls(self, responses_ids, tools=None):
        return "x", [FunctionCall(name="zoom", arguments="{}")] if responses_ids[0] == ZOOM else []


def zoom():
    return ToolResponse(text="see", image=[picture("b", 96)]), 0.0, {}


async def test_image_of_a_tool_is_trained_beside_those_of_the_row(vlm, engine, output):
    """verl's tool loop; the second call shows the engine two images, and was cut by an interruption."""
    calls = [Call(1, [ZOOM, SAY, END], 3), Call(1, [SAY], 1, "aborted"), Call(2, [SAY, END], 2)]
    engine.answers = [call.answer() for call in calls]
    row, sample = opened(picture("r")), live_sample()
    config = config_of(80, "zoom")
    config.actor_rollout_ref.rollout.prompt_length = 48
    workers = PartialRolloutLLMClient(config)
    workers.claims = Claims()
    client = SampleClient(workers, sample, sample.clock)
    pictures = vlm.pictures
    loop = ToolAgentLoop(
        DictConfigWrap(config), client, pictures.tokenizer, pictures.processor, pictures._loop.dataset_cls,
        DictConfigWrap(OmegaConf.create({})), hf_model_type=vlm.kind, tools=ToolListWrap([function("zoom", zoom)]),
    )  # fmt: skip
    made = await loop.run({}, **row)
    images = images_in(made, sample.id)
    digests = tuple(map(digest, images))
    assert [turn.images for turn in sample.turns] == [digests[:1], digests]
    trained = sample_output(sample, [made], [digests])
    assert trained.versions[trained.response_mask.astype(bool)].tolist() == [1, 1, 1, 1, 2, 2]
    pictures.check(trained, images)
    own = await pictures.of_row(closed_row(row))
    trained = replace(trained, images=kept(images, digests, own))
    assert trained.images == (0, png(picture("b", 96)))
    sibling = replace(output(3), prompt_ids=trained.prompt_ids, images=(0,))
    groups = [TakenGroup("0/0", 0, unpack(pack(closed_row(row))), (trained, sibling))]
    batch = assemble_batch(groups, ["a"], 48, 80, vlm.pad)
    await add_images(batch, groups, pictures)
    both, one = batch.non_tensor_batch["multi_modal_inputs"]
    assert len(both["image_grid_thw"]) == 2 and torch.equal(both["image_grid_thw"][:1], one["image_grid_thw"])
    patches = len(one["pixel_values"])
    assert torch.equal(both["pixel_values"][:patches], one["pixel_values"]) and len(both["pixel_values"]) > patches
