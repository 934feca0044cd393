"""Models are built with an attention that is installed; verl's default needs flash-attn, which no extra brings."""

import json

import pytest
import torch
from omegaconf import OmegaConf

from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.tools.check import machine
from recipe.partial_rollout.training.trainer_config import choose_attention
from verl_ext import packed_attention

KEY = "actor_rollout_ref.model.override_config.attn_implementation"
LOG_PROBS = "log-probs of the trainer: float32, in chunks\n"
MISSING = "flash-attn is not installed: pip install flash-attn --no-build-isolation"


@pytest.fixture
def choose(monkeypatch, composed_config):
    """The resolved config of a GPU run after the choice, with flash-attn there or not."""

    def build(*overrides, problem="flash-attn is not installed", name="ppo_partial_rollout"):
        monkeypatch.setattr(packed_attention, "flash_attn_problem", lambda: problem)
        config = composed_config(name, "actor_rollout_ref.actor.strategy=fsdp2", *overrides)
        choose_attention(config)
        OmegaConf.resolve(config)
        return config

    return build


def in_force(config, path="actor_rollout_ref.model"):
    model = OmegaConf.select(config, path)
    return model.override_config.get("attn_implementation"), model.use_remove_padding


@pytest.mark.parametrize(("packs", "chosen"), [(True, "packed"), (False, "sdpa")])
def test_without_flash_attn_torchs_attention_packs_unless_told_not_to_and_is_said_in_one_line(
    choose, capsys, packs, chosen
):
    config = choose("algorithm.adv_estimator=gae", f"actor_rollout_ref.model.use_remove_padding={packs}")
    assert in_force(config) == in_force(config, "critic.model") == (chosen, packs)
    # copied by an interpolation
    assert config.actor_rollout_ref.actor.use_remove_padding is packs
    log_probs, said = capsys.readouterr().out.splitlines()
    assert f"{log_probs}\n" == LOG_PROBS
    assert (
        said.startswith(f"attention of actor_rollout_ref.model ({chosen}) and critic.model ({chosen}): torch's own; ")
        and MISSING in said
    )


@pytest.mark.parametrize("layout", [{"vision_config": {}}, {"attn_logit_softcapping": 50.0}])
def test_a_model_that_does_more_than_causal_attention_over_text_is_padded(choose, tmp_path, layout):
    (tmp_path / "config.json").write_text(json.dumps(layout))
    assert in_force(choose(f"actor_rollout_ref.model.path={tmp_path}")) == ("sdpa", False)
    with pytest.raises(ConfigError, match=f"{KEY}=packed: sdpa with actor_rollout_ref.model.use_remove_padding=False"):
        choose(f"+{KEY}=packed", "actor_rollout_ref.model.use_remove_padding=False")


@pytest.mark.parametrize(
    ("override", "problem", "found", "said"),
    [
        ("data.seed=1", None, (None, True), LOG_PROBS),
        (f"+{KEY}=eager", "flash-attn is not installed", ("eager", True), LOG_PROBS),
        # Megatron brings its own.
        ("actor_rollout_ref.actor.strategy=megatron", "flash-attn is not installed", (None, True), ""),
    ],
)
def test_attention_that_is_there_or_that_the_user_names_stays(choose, capsys, override, problem, found, said):
    assert in_force(choose(override, problem=problem)) == found
    assert capsys.readouterr().out == said


def test_what_needs_flash_attn_is_refused_without_it(choose):
    parallel = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    with pytest.raises(ConfigError, match=f"{KEY}=flash_attention_2: packed, or null: {MISSING}"):
        choose(f"+{KEY}=flash_attention_2")
    with pytest.raises(ConfigError, match=f"{parallel}: 1 with any attention but flash_attention_2"):
        choose(parallel)
    with pytest.raises(ConfigError, match=f"{parallel}: 1 with any attention but flash_attention_2"):
        choose(f"+{KEY}=sdpa", parallel, problem=None)


def test_set_up_check_builds_a_model_with_the_attention_that_it_would_choose(monkeypatch):
    """The day that verl's default can be built without flash-attn, choosing is no longer needed."""
    if packed_attention.flash_attn_problem() is None:
        pytest.skip("flash-attn is installed here")
    assert not machine.flash_attention().stops
    monkeypatch.setattr(packed_attention, "flash_attn_problem", lambda: None)
    for sees_a_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda sees=sees_a_gpu: sees)
        found = machine.flash_attention()
        assert found.stops == sees_a_gpu
        refused = "no model can be built with attn_implementation=flash_attention_2: ImportError"
        assert found.said.startswith(refused if sees_a_gpu else "flash_attention_2")


def test_flash_attn_built_for_another_torch_counts_as_missing(monkeypatch):
    monkeypatch.setattr(packed_attention, "version", lambda package: "2.8.3")

    def broken(name):
        raise ImportError("undefined symbol: _ZN3c104cuda\nand more")

    monkeypatch.setattr(packed_attention.importlib, "import_module", broken)
    assert (
        packed_attention.flash_attn_problem()
        == "flash-attn does not import (ImportError: undefined symbol: _ZN3c104cuda)"
    )
