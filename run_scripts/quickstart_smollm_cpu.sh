#!/usr/bin/env bash
# The quick start with a real language model: SmolLM2-135M-Instruct, from a package of 93 MB, on problems of reasoning-gym. Both
# runs, the table and the pictures are run_scripts/quickstart_cpu.sh's, and so are arguments and variables.
#
#   bash run_scripts/quickstart_smollm_cpu.sh
#   bash run_scripts/quickstart_smollm_cpu.sh trainer.total_training_steps=8
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export TASK=smollm OUT="${OUT:-outputs/quickstart_smollm}"
exec bash run_scripts/quickstart_cpu.sh partial_rollout.overlap=1 partial_rollout.max_staleness=4 trainer.total_training_steps=12 "$@"
