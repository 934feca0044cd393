#!/usr/bin/env bash
# The quick start with images: a picture in each prompt shows the number that the response has to reach, and a tiny Qwen3-VL reads it.
# Both runs, the table and the pictures are run_scripts/quickstart_cpu.sh's, and so are arguments and variables.
#
#   bash run_scripts/quickstart_images_cpu.sh
#   bash run_scripts/quickstart_images_cpu.sh trainer.total_training_steps=8
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export TASK=pictures OUT="${OUT:-outputs/quickstart_images}"
exec bash run_scripts/quickstart_cpu.sh partial_rollout.overlap=1 trainer.total_training_steps=15 "$@"
