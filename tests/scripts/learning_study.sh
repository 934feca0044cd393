#!/usr/bin/env bash
# What noPR, PR and verl's colocate_async learn on the embedded task, at each learning rate: warm starts x data seeds, 48 steps,
# held-out validation every 6. Five to eight minutes a run on two cores, almost half of it validation, and one more where it
# needs other engines than the run before: name arms of a kind (noPR, PR, each resume_kv) side by side. Separate engines start
# anew in each run. A stopped study resumes when run again; finished runs are noted in runs.jsonl.
#
#   bash tests/scripts/learning_study.sh                     # noPR, PR without and with a trust region, three warm starts x three seeds
#   bash tests/scripts/learning_study.sh --quick             # one warm start, one seed
#   bash tests/scripts/learning_study.sh --arms noPR PR_overtake_0_2_mask --rates 2e-4 3e-4 --starts 0 1 --seeds 1
#
# Arguments are those of tests.studies learning. OUT=dir (default outputs/learning) chooses where the runs go.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bash run_scripts/setup.sh
source run_scripts/env_cpu.sh
export PYTHONWARNINGS=ignore

[[ ${1:-} == --quick ]] && set -- --starts 0 --seeds 1 "${@:2}"
exec python -m tests.studies learning --out "${OUT:-outputs/learning}" "$@"
