#!/usr/bin/env bash
# The recipe beside its peers on two cores: noPR, verl's v1 trainers and PR with each policy, real training of the embedded task,
# arms interleaved, three repeats. About eight minutes a run on a slow machine, four hours for all. A stopped study resumes when run again.
#
#   bash run_scripts/bench_peers_cpu.sh
#   bash run_scripts/bench_peers_cpu.sh --arms noPR v1_colocate_async PR_bounded --repeats 1
#   bash run_scripts/bench_peers_cpu.sh --report-only
#
# Arguments are those of recipe.partial_rollout.tools study peers. OUT=dir (default outputs/peers) chooses where the runs go.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash run_scripts/setup.sh --quiet
source run_scripts/env_cpu.sh
export PYTHONWARNINGS=ignore

out=${OUT:-outputs/peers}
python -m recipe.partial_rollout.tasks.clock10.prepare --out "$out/task"
exec python -m recipe.partial_rollout.tools study peers --out "$out" "$@"
