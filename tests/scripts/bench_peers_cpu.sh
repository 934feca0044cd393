#!/usr/bin/env bash
# The recipe beside its peers on two cores: noPR, verl's v1 trainers and PR with each policy, real training of the embedded task,
# arms interleaved, three repeats. About eight minutes a run on a slow machine, four hours for all. A stopped study resumes when run again.
#
#   bash tests/scripts/bench_peers_cpu.sh
#   bash tests/scripts/bench_peers_cpu.sh --arms noPR v1_colocate_async PR_bounded --repeats 1
#   bash tests/scripts/bench_peers_cpu.sh --report-only
#
# Separate placement against verl's separate_async, by wall time (two hours). One validation, at the end: during one the
# engines beside a trainer go on decoding, and the steps around it find their batches ready.
#   OUT=outputs/placement bash tests/scripts/bench_peers_cpu.sh --arms noPR PR_more PR_separate_1.5 PR_separate_2 \
#     v1_separate_async v1_separate_async_quick --repeats 3 --steps 36 trainer.val_before_train=False trainer.test_freq=36
#
# Arguments are those of tests.studies peers. OUT=dir (default outputs/peers) chooses where the runs go.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bash run_scripts/setup.sh --quiet
source run_scripts/env_cpu.sh
export PYTHONWARNINGS=ignore

out=${OUT:-outputs/peers}
python -m recipe.partial_rollout.tasks.ready_start --train --out "$out/task"
exec python -m tests.studies peers --out "$out" "$@"
