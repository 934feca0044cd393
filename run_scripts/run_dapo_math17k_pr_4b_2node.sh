#!/usr/bin/env bash
# DAPO-Math-17k, Qwen3-4B, two nodes of eight GPUs: PR, this recipe. NOT RUN YET on a GPU.
#
#   [DRY_RUN=1] [MODEL=... DATA=... OUT=...] bash run_scripts/run_dapo_math17k_pr_4b_2node.sh [hydra overrides]     docs/gpu.md
exec bash "$(dirname "${BASH_SOURCE[0]}")/recipe.sh" dapo_math17k_4b_2node pr "$@"
