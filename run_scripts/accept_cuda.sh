#!/usr/bin/env bash
# GPU acceptance on one device in 20 minutes, without a download: the check, the tests of holds and log-probs, and four steps of PR
# at learning rate 0 on random weights. tests/gpu/test_acceptance.py has the limits, tests/studies/results/h200.md what an H200 gave.
#
#   bash run_scripts/accept_cuda.sh [pytest's options]
#   VERL_PLATFORM=cpu bash run_scripts/accept_cuda.sh       the same in small, without what only a device has
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ${VERL_PLATFORM:-} == cpu ]]; then
  source run_scripts/env_cpu.sh
else
  command -v nvidia-smi >/dev/null || { echo "accept_cuda: nvidia-smi not found: this needs an NVIDIA GPU" >&2; exit 2; }
  PARTIAL_ROLLOUT_EXTRA=gpu bash run_scripts/setup.sh --quiet
  # shellcheck source=/dev/null
  source "${PARTIAL_ROLLOUT_VENV:-.venv}/bin/activate"
fi
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec python -m pytest -m gpu tests/gpu tests/e2e "$@"
