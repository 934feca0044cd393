#!/usr/bin/env bash
# DAPO-Math-17k, Qwen3-4B, eight GPUs: PR, this recipe. NOT RUN YET on a GPU.
#
#   [DRY_RUN=1] [MODEL=... DATA=... OUT=...] bash run_scripts/run_dapo_math17k_pr_8gpu_4b.sh [hydra overrides]     docs/recipes.md
exec bash "$(dirname "${BASH_SOURCE[0]}")/recipe.sh" dapo_math17k_8gpu_4b pr "$@"
