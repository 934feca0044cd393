#!/usr/bin/env bash
# GPU acceptance on one device in 20 minutes, without a download: the check, the tests of holds and log-probs, and four steps of PR
# at learning rate 0 on random weights, judged; if one fails, which part of vLLM is to blame. tests/studies/results/h200.md has what an H200 gave.
#
#   bash run_scripts/accept_cuda.sh                         Qwen3-0.6B shape, outputs/accept_cuda/accept.json
#   SHAPE=4b OUT=outputs/accept_4b bash run_scripts/accept_cuda.sh [hydra overrides]
#   VERL_PLATFORM=cpu bash run_scripts/accept_cuda.sh       the script itself, on a CPU, in small
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ${VERL_PLATFORM:-} == cpu ]]; then
  python=${PYTHON:-${PARTIAL_ROLLOUT_VENV:-.venv}/bin/python} shape=${SHAPE:-tiny}
else
  command -v nvidia-smi >/dev/null || { echo "accept_cuda: nvidia-smi not found: this needs an NVIDIA GPU" >&2; exit 2; }
  PARTIAL_ROLLOUT_EXTRA=gpu bash run_scripts/setup.sh --quiet
  python=${PARTIAL_ROLLOUT_VENV:-.venv}/bin/python shape=${SHAPE:-0.6b}
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false
exec "$python" -W ignore -m recipe.partial_rollout.tools accept --out "${OUT:-outputs/accept_cuda}" --shape "$shape" -- "$@"
