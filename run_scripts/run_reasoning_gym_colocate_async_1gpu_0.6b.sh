#!/usr/bin/env bash
# Tasks of reasoning-gym, Qwen3-0.6B, one GPU: colocate_async, verl's own partial rollout. NOT RUN YET on a GPU.
#
#   [DRY_RUN=1] [MODEL=... DATA=... OUT=...] bash run_scripts/run_reasoning_gym_colocate_async_1gpu_0.6b.sh [hydra overrides]     docs/recipes.md
exec bash "$(dirname "${BASH_SOURCE[0]}")/recipe.sh" reasoning_gym_1gpu_0.6b colocate_async "$@"
