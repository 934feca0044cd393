"""Models are built with an attention that is installed; verl's default needs flash-attn, which no extra brings."""

import pytest
import torch
from omegaconf import OmegaConf

from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.training.trainer_config import choose_attention
from verl_ext import attention, check

KEY = "actor_rollout_ref.model.override_config.attn_implementation"
LOG_PROBS = "log-probs of the trainer: float32, in chunks\n"
MISSING = "flash-attn is not installed: pip install flash-attn --no-build-isolation"


@pytest.fixture
def choose(monkeypatch, composed_config):
    """The resolved config of a GPU run after the choice, with flash-attn there or not."""

    def build(*overrides, problem="flash-attn is not installed", name="ppo_partial_rollout"):
        monkeypatch.setattr(attention, "flash_attn_problem", lambda: problem)
        config = composed_config(name, "actor_rollout_ref.actor.strategy=fsdp2", *overrides)
        choose_attention(config)
        OmegaConf.resolve(config)
        return config

    return build


def in_force(config, path="actor_rollout_ref.model"):
    model = OmegaConf.select(config, path)
    return model.override_config.get("attn_implementation"), model.use_remove_padding


def test_verls_default_cannot_be_built_without_flash_attn():
    """The day it can, choosing is no longer needed."""
    if attention.flash_attn_problem() is None:
        pytest.skip("flash-attn is installed here")
    with pytest.raises(ImportError, match="FlashAttention2 has been toggled on, but it cannot be used"):
        attention.build(attention.FLASH)


def test_without_flash_attn_torchs_attention_is_chosen_unpacked_and_said_in_one_line(choose, capsys):
    config = choose()
    assert in_force(config) == ("sdpa", False)
    # copied by an interpolation
    assert config.actor_rollout_ref.actor.use_remove_padding is False
    assert capsys.readouterr().out == LOG_PROBS + (
        "attention of actor_rollout_ref.model: torch's own (sdpa), unpacked; for verl's default, flash_attention_2, "
        f"{MISSING}\n"
    )


def test_with_flash_attn_verls_defaults_stand(choose, capsys):
    assert in_force(choose(problem=None)) == (None, True)
    assert capsys.readouterr().out == LOG_PROBS


def test_attention_that_the_user_names_stays(choose, capsys):
    assert in_force(choose(f"+{KEY}=eager")) == ("eager", True)
    assert capsys.readouterr().out == LOG_PROBS


def test_critic_that_trains_gets_it_too(choose, capsys):
    assert in_force(choose("algorithm.adv_estimator=gae"), "critic.model") == ("sdpa", False)
    assert "attention of actor_rollout_ref.model and critic.model: " in capsys.readouterr().out


def test_megatron_brings_its_own_attention(choose, capsys):
    config = choose("actor_rollout_ref.actor.strategy=megatron")
    assert in_force(config) == (None, True) and capsys.readouterr().out == ""


def test_what_needs_flash_attn_is_refused_without_it(choose):
    parallel = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    with pytest.raises(ConfigError, match=f"{KEY}=flash_attention_2: sdpa, or null: {MISSING}"):
        choose(f"+{KEY}=flash_attention_2")
    with pytest.raises(ConfigError, match=f"{parallel}: 1 with any attention but flash_attention_2"):
        choose(parallel)
    with pytest.raises(ConfigError, match=f"{parallel}: 1 with any attention but flash_attention_2"):
        choose(f"+{KEY}=sdpa", parallel, problem=None)


def test_set_up_check_builds_a_model_and_says_what_to_install(monkeypatch):
    monkeypatch.setattr(attention, "flash_attn_problem", lambda: "flash-attn is not installed")
    assert check.attention_failure(flash_runs=True) is None
    implementation, remedy = check.chosen_attention()
    assert implementation == "sdpa"
    assert remedy == f" (flash-attn is not installed; for verl's default, flash_attention_2: {attention.INSTALL})"


def test_set_up_check_fails_where_the_attention_that_is_found_builds_no_model(monkeypatch):
    if attention.flash_attn_problem() is None:
        pytest.skip("flash-attn is installed here")
    monkeypatch.setattr(attention, "flash_attn_problem", lambda: None)
    assert check.attention_failure(flash_runs=True).startswith(
        "no model can be built with attn_implementation=flash_attention_2: ImportError: FlashAttention2"
    )
    assert check.attention_failure(flash_runs=False) is None


def test_flash_attn_built_for_another_torch_counts_as_missing(monkeypatch):
    monkeypatch.setattr(attention, "version", lambda package: "2.8.3")

    def broken(name):
        raise ImportError("undefined symbol: _ZN3c104cuda\nand more")

    monkeypatch.setattr(attention.importlib, "import_module", broken)
    assert attention.flash_attn_problem() == "flash-attn does not import (ImportError: undefined symbol: _ZN3c104cuda)"


def test_packed_rows_would_be_right_with_torchs_attention():
    """Not packing costs speed; ``training/trainer_config.py`` says why it is done all the same."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    config = Qwen3Config(vocab_size=32, num_hidden_layers=2, **shape)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    rows = [torch.arange(7)[None], torch.arange(5)[None] + 9]
    apart = torch.cat([model(row, use_cache=False).logits for row in rows], dim=1)
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    packed = model(torch.cat(rows, dim=1), attention_mask=None, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed, apart)
