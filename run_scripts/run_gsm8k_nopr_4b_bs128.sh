#!/usr/bin/env bash
# GSM8K, Qwen3-4B, eight GPUs, batches of 128 x 8: noPR, verl's synchronous rollout. NOT RUN YET on a GPU.
#
#   [DRY_RUN=1] [MODEL=... DATA=... OUT=...] bash run_scripts/run_gsm8k_nopr_4b_bs128.sh [hydra overrides]     docs/gpu.md
exec bash "$(dirname "${BASH_SOURCE[0]}")/recipe.sh" gsm8k_4b_bs128 nopr "$@"
