#!/usr/bin/env bash
# Runs every test with the GPU's versions of vLLM, torch and transformers, on a CPU, and ends with a summary for docs/compat.md. CI
# does not run it: it needs an environment of its own (.venv-gpu-pins, 4.6 GB to download, made by the first run) and half an hour.
#
#   bash run_scripts/test_gpu_pins.sh                          unit, integration and e2e
#   bash run_scripts/test_gpu_pins.sh tests/unit -k contract   only pytest with those arguments
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PARTIAL_ROLLOUT_EXTRA=gpu-pins PARTIAL_ROLLOUT_VENV="${PARTIAL_ROLLOUT_VENV:-.venv-gpu-pins}"
bash run_scripts/setup.sh --quiet
source run_scripts/env_cpu.sh

if (($#)); then
  exec python -m pytest "$@"
fi

out=outputs/gpu_pins
rm -rf "$out"
mkdir -p "$out"
failed=0

layer() { # name, pytest options...
  local name=$1
  shift
  # A layer that fails does not keep the next one from being tested.
  python -m pytest "tests/$name" --junitxml="$out/$name.xml" -o junit_family=xunit1 "$@" || failed=1
}

layer unit
layer integration
# As in run_tests.sh: two trainings at once, whose OpenMP threads sleep where they wait.
export OMP_WAIT_POLICY=passive
layer e2e -n 2 --dist loadfile --no-loadscope-reorder -m 'not benchmarks'
python tests/summary.py "$out"/{unit,integration,e2e}.xml | tee "$out/summary.md"
exit "$failed"
