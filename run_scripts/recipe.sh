#!/usr/bin/env bash
# Trains one experiment (conf/experiment) with one arm (conf/arm). What has run on a GPU: docs/gpu.md.
#
#   bash run_scripts/recipe.sh                                lists both
#   bash run_scripts/recipe.sh gsm8k_8gpu_4b pr [hydra overrides]
#   DRY_RUN=1 bash run_scripts/recipe.sh gsm8k_8gpu_4b pr     checks everything that needs no GPU, and prints the plan
#
# MODEL=DIR or hub id, DATA=DIR, OUT=DIR, NNODES, GPUS_PER_NODE, LOGGER=swanlab, RAY_ADDRESS, PYTHON: docs/gpu.md
set -euo pipefail

die() {
  printf 'recipe: %s\n' "$*" >&2
  exit 2
}

names() { basename -s .yaml "$1"/*.yaml | tr '\n' ' '; }

# Each file of a folder with its first comment.
list() {
  local file
  for file in "$1"/*.yaml; do
    printf '  %-28s %s\n' "$(basename -s .yaml "$file")" "$(sed -n '2s/^# //p' "$file")"
  done
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if (($# == 0)); then
  printf '[DRY_RUN=1] [MODEL=... DATA=... OUT=...] bash run_scripts/recipe.sh EXPERIMENT ARM [hydra overrides]     docs/gpu.md\n'
  printf '\nexperiments\n' && list conf/experiment
  printf '\narms\n' && list conf/arm
  exit 0
fi
experiment=${1:-} arm=${2:-}
[[ -f conf/experiment/$experiment.yaml ]] || die "experiment '$experiment': one of $(names conf/experiment)"
[[ -f conf/arm/$arm.yaml ]] || die "arm '$arm': one of $(names conf/arm)"
shift 2

python=${PYTHON:-${PARTIAL_ROLLOUT_VENV:-.venv}/bin/python}
command -v "$python" >/dev/null ||
  die "no Python at $python: run PARTIAL_ROLLOUT_EXTRA=gpu bash run_scripts/setup.sh, or set PYTHON to one that has verl"
if [[ ${VERL_PLATFORM:-} != cpu && ${DRY_RUN:-0} == 0 && -z ${RAY_ADDRESS:-} ]] && ! command -v nvidia-smi >/dev/null; then
  die "no GPU (nvidia-smi not found): set RAY_ADDRESS to a cluster that has them, or DRY_RUN=1 to check without"
fi

overrides=(experiment="$experiment" arm="$arm")
set_from() { # variable, hydra key, text around the value
  [[ -z ${!1:-} ]] || overrides+=("$2=${3:-}${!1}${4:-}")
}
set_text_from() { # variable, hydra key; in quotes hydra takes any text
  [[ -z ${!1:-} ]] || overrides+=("$2='${!1//\'/\\\'}'")
}
set_text_from MODEL actor_rollout_ref.model.path
set_text_from DATA recipe.data
set_text_from OUT recipe.out
set_from NNODES trainer.nnodes
set_from GPUS_PER_NODE trainer.n_gpus_per_node
set_from LOGGER trainer.logger '[file,' ']'

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONWARNINGS=${PYTHONWARNINGS:-ignore}
recipe=(-m recipe.partial_rollout.main_ppo --config-name recipe)
if [[ ${DRY_RUN:-0} != 0 ]]; then
  exec "$python" "${recipe[@]}" --check "${overrides[@]}" "$@"
fi
if [[ $arm != colocate_async ]]; then
  exec "$python" "${recipe[@]}" "${overrides[@]}" "$@"
fi
# verl's own trainer leaves the metrics' place to its caller, and has no line a step but the console's.
out=${OUT:-outputs/$experiment}/$arm
mkdir -p "$out"
export VERL_FILE_LOGGER_PATH=${VERL_FILE_LOGGER_PATH:-$(realpath "$out")/metrics.jsonl}
exec "$python" -m recipe.partial_rollout.tools.verl_trainer --config-name recipe 'trainer.logger=[console,file]' \
  "${overrides[@]}" "$@"
