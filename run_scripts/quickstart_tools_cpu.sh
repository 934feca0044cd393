#!/usr/bin/env bash
# The quick start with tools: each response is a conversation in which the model calls a calculator that takes its time. Both runs,
# the table and the pictures are run_scripts/quickstart_cpu.sh's, and so are arguments and variables.
#
#   bash run_scripts/quickstart_tools_cpu.sh
#   TOOL_MEDIAN_S=1 bash run_scripts/quickstart_tools_cpu.sh partial_rollout.tools.release_after_s=inf   # slow calls hold their slots
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export TASK=calculator OUT="${OUT:-outputs/quickstart_tools}"
exec bash run_scripts/quickstart_cpu.sh partial_rollout.overlap=1 trainer.total_training_steps=15 "$@"
