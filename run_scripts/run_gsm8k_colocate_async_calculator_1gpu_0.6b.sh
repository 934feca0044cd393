#!/usr/bin/env bash
# GSM8K, Qwen3-0.6B, a calculator, one GPU: colocate_async, verl's own partial rollout. NOT RUN YET on a GPU.
#
#   [DRY_RUN=1] [MODEL=... DATA=... OUT=...] bash run_scripts/run_gsm8k_colocate_async_calculator_1gpu_0.6b.sh [hydra overrides]     docs/recipes.md
exec bash "$(dirname "${BASH_SOURCE[0]}")/recipe.sh" gsm8k_calculator_1gpu_0.6b colocate_async "$@"
