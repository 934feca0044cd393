"""A key that verl declares and never reads is refused, or named here as harmless: a new release of verl shows the next.

A name counts as read wherever verl takes it from an object, of whatever section. So a key whose name is read elsewhere,
such as ``data.tokenizer``, is not found.
"""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest
import verl
from hydra.utils import get_class
from omegaconf import OmegaConf, open_dict

from recipe.partial_rollout.config.keys import ConfigError, leaves
from recipe.partial_rollout.preflight.learning_rules import LEARNING, TRAINING
from recipe.partial_rollout.preflight.rule import broken
from recipe.partial_rollout.preflight.verl_keys import check_verl_keys

VERL = Path(verl.__file__).parent
NOT_OURS = r"sglang|trtllm|veomni|torchtitan|automodel|mindspeed|sft|rollout/schemas|experimental/(?!agent|reward)"
"""paths of verl's files that no run of the recipe executes"""
ENGINES = {
    "fsdp2": (r"megatron|mcore", r"turbo_config"),
    "megatron": (r"engine/fsdp|fsdp_\w+", r"override_transformer_config|model\.lora"),
}
"""by training engine: paths of files that it does not execute, and sections that verl hands to its library"""
NO_KEYS = (
    r"partial_rollout|train_engine|transfer|engine|model_engine"  # the recipe's
    r"|ray_kwargs|transfer_queue|global_profiler"  # handed to other libraries
    r"|distillation|reward\.reward_model|actor_rollout_ref\.ref"  # models that are not trained
    r"|actor_rollout_ref\.rollout\.(custom|mtp)"  # the user's, and a copy
)
HARMLESS = {
    # speed and memory
    *("multi_stage_wake_up", "standalone_gpu_memory_utilization", "forward_max_token_len_per_gpu", "use_torch_compile"),
    *("enable_gradient_checkpointing", "enable_activation_offload", "use_liger", "impl_backend", "nccl_timeout"),
    # The dataset returns the prompt's messages, and a loop's tokens are the engine's, whatever these say.
    *("return_raw_chat", "return_raw_input_ids", "return_full_prompt", "return_multi_modal_inputs"),
    *("use_inference_chat_template", "tokenization_sanity_check_mode"),
    # They change nothing unless a key is set that is refused, or another engine runs.
    *("mtp_loss_scaling_factor", "detach_encoder", "target_parameters", "ib_device", "sglang_engine_mode"),
    *("speculative_algorithm", "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_num_steps"),
    # names of files, tensors and servers
    *("dist_checkpointing_prefix", "replay_file", "layer_name_map", "server"),
}
"""names of keys that are not read, and of which nobody would expect that they train something else"""


def names_read(node, kept=None):
    """Names that the syntax tree takes from an object or has as a parameter, and the words of text without spaces.

    ``self.x = config.get("x")`` reads no ``x``: whatever takes ``self.x`` does.
    """
    found = []
    match node:
        case ast.Assign(targets=[ast.Attribute(attr=kept)]):
            pass
        case ast.Attribute(attr=name, ctx=ast.Load()) | ast.arg(arg=name):
            found = [name]
        case ast.Constant(value=str(text)) if not re.search(r"\s", text):
            found = re.findall(r"\w+", text)
    yield from (name for name in found if name != kept)
    for child in ast.iter_child_nodes(node):
        yield from names_read(child, kept)


def with_fields(node):
    """``node`` with the fields of its dataclasses that it lacks; they can be added with ``+``."""
    if not isinstance(node, dict):
        return node
    target = node.pop("_target_", None)
    lacking = {field.name: None for field in fields(get_class(target))} if target else {}
    return {name: with_fields(value) for name, value in (lacking | node).items()}


def errors(config, key, default):
    """Errors that name ``key`` once it has another value than ``default``."""
    other = not default if isinstance(default, bool) else default + 1 if isinstance(default, int | float) else "other"
    with open_dict(config):
        OmegaConf.update(config, key, [other] if isinstance(default, list) else other)
    said = [*map(str, broken((*TRAINING, *LEARNING), config))]
    try:
        check_verl_keys(config)
    except ConfigError as error:
        said.append(str(error))
    OmegaConf.update(config, key, default)
    return [each for each in said if each.startswith(f"{key}=") and "read" in each]


@pytest.mark.parametrize("engine", ENGINES)
def test_key_that_verl_never_reads_is_refused_or_harmless(resolved_config, engine):
    config = resolved_config("quickstart_cpu", f"engine={engine}", "algorithm.adv_estimator=gae", "critic.enable=True")
    files, sections = ENGINES[engine]
    paths = [path for path in VERL.rglob("*.py") if not re.search(f"{NOT_OURS}|{files}", str(path.relative_to(VERL)))]
    read = {name for path in paths for name in names_read(ast.parse(path.read_text()))} | HARMLESS
    declared = leaves(with_fields(OmegaConf.to_container(config)))
    unread = {key: value for key, value in declared if key.rpartition(".")[2] not in read}
    keys = [key for key in unread if not re.match(rf"({NO_KEYS})\b|.*\b({sections})\b", key)]
    assert [key for key in keys if not errors(config, key, unread[key])] == []
    assert "actor_rollout_ref.actor.freeze_vision_tower" in keys, "it finds what nothing reads"
