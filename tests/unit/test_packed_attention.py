"""Sequences of a packed row attend within themselves, as each alone does, and without a mask of the whole row.

Models are built with an attention that is installed; verl's default needs flash-attn, which no extra brings.
"""

import json
from types import SimpleNamespace

import pytest
import torch
import verl  # noqa: F401  its plugins register the attention
from omegaconf import OmegaConf
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.training.trainer_config import choose_attention
from verl_ext import packed_attention

LENGTHS = (37, 5, 1, 64, 19)
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def model(attention, **more):
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, **HEADS, **more)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float64)


def packed_row():
    ids = [torch.randint(0, 64, (length,)) for length in LENGTHS]
    return ids, torch.cat(ids)[None], torch.cat([torch.arange(length) for length in LENGTHS])[None]


@pytest.mark.parametrize("window", [{}, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_outputs_and_gradients_are_those_of_each_sequence_alone(window, checkpointing):
    packed, alone = model(packed_attention.NAME, **window), model("sdpa", **window)
    if checkpointing:
        packed.gradient_checkpointing_enable()
        packed.train()
    ids, row, positions = packed_row()
    found = packed(input_ids=row, position_ids=positions, use_cache=False).logits[0]
    wanted = torch.cat([alone(input_ids=each[None], use_cache=False).logits[0] for each in ids])
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(found)
    for logits in (found, wanted):
        (logits * weights).sum().backward()
    for mine, theirs in zip(packed.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"position_ids": None}, "takes one packed row"),
        ({"position_ids": torch.zeros(2, 4)}, "takes one packed row"),
        ({"attention_mask": torch.ones(1, 4)}, "takes one packed row"),
        ({"softcap": 30.0}, "softcap, which attention .* does not support"),
        ({"s_aux": torch.zeros(2)}, "s_aux, which attention .* does not support"),
        ({"dropout": 0.1}, "dropout, which attention .* does not support"),
        ({"module": SimpleNamespace(is_causal=False)}, "is causal"),
    ],
)
def test_what_it_does_not_do_is_refused_and_says_what_does(options, said):
    heads = torch.zeros(1, 2, 4, 8)
    arguments = {"module": SimpleNamespace(), "attention_mask": None, "position_ids": torch.arange(4)[None]} | options
    with pytest.raises(NotImplementedError, match=f"{said}.*attn_implementation=sdpa"):
        packed_attention.attend(query=heads, key=heads, value=heads, **arguments)


def test_a_critic_is_built_with_the_attention_of_its_config(tmp_path, monkeypatch):
    """verl's own does not: the day that it does, the patch may go."""
    from verl.utils import model as verls

    model("sdpa").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, attn_implementation=packed_attention.NAME)
    arguments = str(tmp_path), torch.float32, config, False
    assert verls.load_valuehead_model(*arguments).config._attn_implementation == packed_attention.NAME
    monkeypatch.setattr(verls, "is_trl_available", lambda: False)
    with pytest.raises(RuntimeError, match="please install trl"):
        verls.load_valuehead_model.__wrapped__(*arguments)


# -- which attention a model is built with -----------------------------------------------------------------------------


KEY = "actor_rollout_ref.model.override_config.attn_implementation"
MISSING = "flash-attn is not installed: pip install flash-attn --no-build-isolation"


@pytest.fixture
def choose(monkeypatch, composed_config):
    """The resolved config of a GPU run after the choice, with flash-attn there or not."""

    def build(*overrides, problem="flash-attn is not installed"):
        monkeypatch.setattr(packed_attention, "flash_attn_problem", lambda: problem)
        config = composed_config("ppo_partial_rollout", "actor_rollout_ref.actor.strategy=fsdp2", *overrides)
        choose_attention(config)
        OmegaConf.resolve(config)
        return config

    return build


def in_force(config, path="actor_rollout_ref.model"):
    model = OmegaConf.select(config, path)
    return model.override_config.get("attn_implementation"), model.use_remove_padding


@pytest.mark.parametrize(("packs", "chosen"), [(True, "packed"), (False, "sdpa")])
def test_without_flash_attn_torchs_attention_packs_unless_told_not_to(choose, capsys, packs, chosen):
    config = choose("algorithm.adv_estimator=gae", f"actor_rollout_ref.model.use_remove_padding={packs}")
    assert in_force(config) == in_force(config, "critic.model") == (chosen, packs)
    # copied by an interpolation
    assert config.actor_rollout_ref.actor.use_remove_padding is packs
    (said,) = capsys.readouterr().out.splitlines()
    models = f"actor_rollout_ref.model ({chosen}) and critic.model ({chosen})"
    assert said.startswith(f"attention of {models}: torch's own; ") and MISSING in said


LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
MIXED = ["linear_attention", "full_attention"]
KINDS = {
    "gemma3_text": ({"sliding_window": 4}, "packed"),
    "jetmoe": ({"kv_channels": 16, "num_local_experts": 2}, "packed"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "sdpa"),
    "qwen3_5_text": ({**LINEAR, "layer_types": MIXED}, "sdpa"),
    "minimax": ({"layer_types": MIXED, "num_local_experts": 2}, "sdpa"),
    "falcon_h1": ({**MAMBA, "mamba_d_ssm": 128}, "sdpa"),
    "granitemoehybrid": ({**MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 0}, "sdpa"),
    # Its attention is none of transformers' table.
    "nemotron": ({}, "sdpa"),
    "bloom": ({"n_head": 4, "n_layer": 2}, "eager"),
    "gpt_oss": ({"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8}, "eager"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_row_of_a_micro_batch_affects_another_in_a_model_of_any_kind(choose, tmp_path, kind):
    """As verl lays them out: one packed row, or rows that are padded on the right."""
    more, wanted = KINDS[kind]
    layout = AutoConfig.for_model(kind, **SIZES, **HEADS, **more)
    layout.save_pretrained(tmp_path)
    attention, packs = in_force(choose(f"actor_rollout_ref.model.path={tmp_path}"))
    assert (attention, packs) == (wanted, wanted == "packed")
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(layout, attn_implementation=attention).eval()
    for weights in built.parameters():
        torch.nn.init.normal_(weights, std=0.1)
    ids, row, positions = packed_row()
    alone = [built(input_ids=each[None], use_cache=False).logits[0] for each in ids]
    if packs:
        found = built(input_ids=row, position_ids=positions, use_cache=False).logits[0].split(LENGTHS)
    else:
        batch = {"input_ids": ids, "position_ids": positions[0].split(LENGTHS), "attention_mask": [x >= 0 for x in ids]}
        padded = {name: pad_sequence([*rows], batch_first=True) for name, rows in batch.items()}
        logits = built(**padded, use_cache=False).logits
        found = [each[:length] for each, length in zip(logits, LENGTHS, strict=True)]
    for mine, theirs in zip(found, alone, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_a_model_that_carries_state_is_padded_with_any_attention_unless_verl_splits_its_rows(choose, tmp_path, capsys):
    layout = {"vision_config": {}, "text_config": {"layer_types": MIXED}}
    path = f"actor_rollout_ref.model.path={tmp_path}"
    for kind, packs in (("qwen3_5", True), ("lfm2_vl", False), ("of_its_own_code", False)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | layout))
        assert in_force(choose(path, problem=None)) == (None, packs)
        assert in_force(choose(path, f"+{KEY}=eager")) == ("eager", packs)
        said = "rows of actor_rollout_ref.model are padded: their layers would mix packed sequences"
        assert [line[: len(said)] for line in capsys.readouterr().out.splitlines()] == [said] * 2 * (not packs)


@pytest.mark.parametrize("layout", [{"vision_config": {}}, {"attn_logit_softcapping": 50.0}])
def test_a_model_that_does_more_than_causal_attention_over_text_is_padded(choose, tmp_path, layout):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | layout))
    path = f"actor_rollout_ref.model.path={tmp_path}"
    assert in_force(choose(path)) == ("sdpa", False)
    # As platform=cpu has it for every model.
    assert in_force(choose(path, f"+{KEY}=packed")) == ("sdpa", False)
    with pytest.raises(ConfigError, match=f"{KEY}=packed: must be sdpa with actor_rollout_ref.model.use_remove"):
        choose(f"+{KEY}=packed", "actor_rollout_ref.model.use_remove_padding=False")


@pytest.mark.parametrize(
    ("override", "problem", "found"),
    [
        ("data.seed=1", None, (None, True)),
        (f"+{KEY}=eager", "flash-attn is not installed", ("eager", True)),
        # Megatron brings its own.
        ("actor_rollout_ref.actor.strategy=megatron", "flash-attn is not installed", (None, True)),
    ],
)
def test_attention_that_is_there_or_that_the_user_names_stays(choose, capsys, override, problem, found):
    assert in_force(choose(override, problem=problem)) == found
    assert capsys.readouterr().out == ""


def test_what_needs_flash_attn_is_refused_without_it(choose):
    parallel = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    said = f"{KEY}=flash_attention_2: must be packed or null unless you install it .{MISSING}"
    with pytest.raises(ConfigError, match=said):
        choose(f"+{KEY}=flash_attention_2")
    for overrides, problem in (([], "flash-attn is not installed"), ([f"+{KEY}=sdpa"], None)):
        with pytest.raises(ConfigError, match=f"{parallel}: must be 1 with any attention but flash_attention_2"):
            choose(parallel, *overrides, problem=problem)
