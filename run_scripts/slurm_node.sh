#!/usr/bin/env bash
# Runs a Ray node as a step of run_scripts/slurm_recipe.sh, which starts it.
#
#   srun ... bash run_scripts/slurm_node.sh --head | --address=IP:PORT [other arguments of ray start]
set -euo pipefail

# SLURM announces a preemption by SIGTERM to the steps alone. Ray would end at once, and with it the workers that hold what the
# trainer saves. So this shell takes the signal, Ray has a session of its own, and the first node tells the batch script.
trap : TERM
[[ ${1:-} != --head ]] || trap 'scancel --batch --signal=USR1 "$SLURM_JOB_ID" || true' TERM

setsid "$PYTHON" -m ray.scripts.scripts start "$@" --block &
ray=$!
status=0
while kill -0 "$ray" 2>/dev/null; do
  status=0
  wait "$ray" || status=$?
done
exit "$status"
