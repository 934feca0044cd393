#!/usr/bin/env bash
# Runs a recipe as a SLURM job: Ray on every node, the trainer on the first. NOT RUN YET under SLURM: docs/clusters.md
#
#   sbatch --nodes=2 run_scripts/slurm_recipe.sh dapo_math17k_4b_2node pr [hydra overrides]         from the repository's root
#   DRY_RUN=1 SLURM_JOB_NODELIST=... GPUS_PER_NODE=8 bash run_scripts/slurm_recipe.sh ...           prints what would run where
#
# The variables of run_scripts/recipe.sh, and HEAD_IP (the first node's address), RAY_PORT, START_S (time for all nodes to join).
#SBATCH --job-name=partial-rollout
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@600
set -euo pipefail

say() { printf 'slurm_recipe: %s\n' "$*"; }
die() {
  say "$*" >&2
  exit 2
}

# A step of the job: Ray on one node, with the arguments of `ray start` (--head or --address=IP:PORT, ...).
run_node() {
  # SLURM announces a preemption by SIGTERM to the steps alone. Ray would end at once, and with it the workers that hold what the
  # trainer saves. So this shell takes the signal, Ray has a session of its own, and the first node tells the batch script.
  trap : TERM
  [[ $1 != --head ]] || trap 'scancel --batch --signal=USR1 "$SLURM_JOB_ID" || true' TERM
  setsid "$PYTHON" -m ray.scripts.scripts start "$@" --block &
  local ray=$! status=0
  while kill -0 "$ray" 2>/dev/null; do
    status=0
    wait "$ray" || status=$?
  done
  exit "$status"
}

# sbatch runs a copy of this file, in a directory of its own.
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"
[[ -f run_scripts/recipe.sh ]] || die "$PWD: submit from the root of the repository"
[[ ${1:-} != --node ]] || run_node "${@:2}"
[[ -f conf/experiment/${1:-}.yaml && -f conf/arm/${2:-}.yaml ]] ||
  die "experiment '${1:-}', arm '${2:-}': bash run_scripts/recipe.sh lists what there is"

python=${PYTHON:-${PARTIAL_ROLLOUT_VENV:-.venv}/bin/python}
port=${RAY_PORT:-6379}
gpus=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
[[ -n ${SLURM_JOB_NODELIST:-} ]] || die "SLURM_JOB_NODELIST is not set: start this with sbatch"
[[ -n $gpus ]] || die "no GPUs: sbatch --gpus-per-node=8 ..., or GPUS_PER_NODE"
command -v scontrol >/dev/null || die "scontrol not found: it turns SLURM_JOB_NODELIST into names"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
[[ ${#nodes[@]} -gt 0 ]] || die "scontrol names no node of SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST"

export PYTHON=$python NNODES=${#nodes[@]} GPUS_PER_NODE=$gpus
[[ -z ${OUT:-} ]] || OUT=$(realpath -m "$OUT")
size=(--num-gpus="$gpus" ${SLURM_CPUS_PER_TASK:+--num-cpus="$SLURM_CPUS_PER_TASK"})
step=(srun --nodes=1 --ntasks=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"})

if [[ ${DRY_RUN:-0} != 0 ]]; then
  address=${HEAD_IP:-${nodes[0]}}:$port
  say "${nodes[0]}: ray start --head --port=$port ${size[*]}"
  for node in "${nodes[@]:1}"; do
    say "$node: ray start --address=$address ${size[*]}"
  done
  say "${nodes[0]}: RAY_ADDRESS=$address NNODES=$NNODES GPUS_PER_NODE=$gpus bash run_scripts/recipe.sh $*"
  exit 0
fi

steps=() trainer='' ended_by='' told='' signalled=''
start_node() { # node, arguments of ray start
  "${step[@]}" --nodelist="$1" bash run_scripts/slurm_recipe.sh --node "${@:2}" "${size[@]}" &
  steps+=($!)
}

# srun answers SIGTERM by killing its step.
stop_nodes() {
  trap - EXIT
  kill "${steps[@]}" 2>/dev/null || true
  wait "${steps[@]}" 2>/dev/null || true
}

# The trainer takes a second SIGTERM for an order to end at once, without saving.
tell_trainer() {
  [[ -n $ended_by && -n $trainer && -z $told ]] || return 0
  told=1
  kill -TERM "$trainer" 2>/dev/null || true
}

# shellcheck disable=SC2329 # traps call it
end_by() {
  signalled=1
  [[ -z $ended_by ]] || return 0
  ended_by=$1
  say "SIG$1: the trainer saves and ends"
  tell_trainer
}

await_head() {
  local deadline=$((SECONDS + ${START_S:-600}))
  until "$python" -m ray.scripts.scripts status --address "$RAY_ADDRESS" >/dev/null 2>&1; do
    kill -0 "${steps[0]}" 2>/dev/null || die "Ray did not start on ${nodes[0]}"
    ((SECONDS < deadline)) || die "no Ray at $RAY_ADDRESS within ${START_S:-600} s: HEAD_IP names the address of ${nodes[0]}"
    sleep 1
  done
}

await_gpus() {
  "$python" -W ignore - "$((NNODES * gpus))" "${START_S:-600}" <<'PYTHON'
import sys, time, ray

wanted, seconds = map(int, sys.argv[1:])
ray.init(log_to_driver=False, logging_level="error")
end = time.monotonic() + seconds
while (found := ray.cluster_resources().get("GPU", 0)) < wanted:
    if time.monotonic() > end:
        sys.exit(f"slurm_recipe: {found:.0f} of {wanted} GPUs have joined within {seconds} s")
    time.sleep(1)
PYTHON
}

# SIGTERM ends the job (scancel); SIGUSR1 announces the end of its time, or a preemption, and the job comes back.
trap stop_nodes EXIT
trap 'end_by USR1' USR1
trap 'end_by TERM' TERM

# Others on the network may reach these ports: Ray asks everyone for the job's token.
RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(tr -d - </proc/sys/kernel/random/uuid)}
export RAY_AUTH_TOKEN RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
export RAY_ADDRESS=${HEAD_IP:-$(hostname -I | cut -d ' ' -f 1)}:$port
start_node "${nodes[0]}" --head --node-ip-address="${RAY_ADDRESS%:*}" --port="$port"
await_head
for node in "${nodes[@]:1}"; do
  start_node "$node" --address="$RAY_ADDRESS"
done
await_gpus

status=143
if [[ -z $ended_by ]]; then
  say "start ${SLURM_RESTART_COUNT:-0} of job ${SLURM_JOB_ID:-}: $1 $2 on $NNODES x $gpus GPUs"
  # The user's resume_mode applies until a start of this job has begun to train: then verl's tracker file is newer than the mark.
  # hydra takes a key's last value.
  out=${OUT:-outputs/$1} again=()
  mark=$out/.job_${SLURM_JOB_ID:-}_$2
  if [[ ! -e $mark ]]; then
    mkdir -p "$out" && : >"$mark"
  elif [[ $out/$2/latest_checkpointed_iteration.txt -nt $mark ]]; then
    again=(trainer.resume_mode=auto)
  fi
  bash run_scripts/recipe.sh "$@" "${again[@]}" &
  trainer=$!
  tell_trainer
  # `wait` returns when a signal comes, too.
  while :; do
    signalled='' status=0
    wait "$trainer" || status=$?
    [[ -n $signalled ]] || break
  done
fi
stop_nodes
if [[ $ended_by == USR1 && $status != 0 ]]; then
  say "requeued; the next start resumes from the newest checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
