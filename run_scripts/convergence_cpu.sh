#!/usr/bin/env bash
# Convergence on the embedded task: noPR, PR with correction and PR without it, at max_staleness 1, 4 and 8 with the largest overlap
# that each bound allows; three seeds each. Writes docs/convergence.md and docs/convergence.png. An hour and a half on two cores.
# A stopped study resumes when run again.
#
#   bash run_scripts/convergence_cpu.sh
#   bash run_scripts/convergence_cpu.sh --seeds 1 --staleness 4 8:2 --steps 40
#   OUT=outputs/high_lr bash run_scripts/convergence_cpu.sh --staleness 1 4 8:2 8 --docs docs/convergence_high_lr \
#     actor_rollout_ref.actor.optim.lr=3e-4 partial_rollout.drain=True
#   bash run_scripts/convergence_cpu.sh --report-only
#
# Arguments are those of recipe.partial_rollout.tools study convergence. OUT=dir (default outputs/convergence) chooses where the runs go.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash run_scripts/setup.sh
source run_scripts/env_cpu.sh
export PYTHONWARNINGS=ignore

out=${OUT:-outputs/convergence}
python -m recipe.partial_rollout.tasks.clock10.prepare --out "$out/task"
exec python -m recipe.partial_rollout.tools study convergence --out "$out" "$@"
