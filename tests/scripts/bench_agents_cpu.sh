#!/usr/bin/env bash
# Agents on two cores: conversations of three turns with verl's tool_agent, and a tool whose 99th percentile is ten times its mean.
# noPR, PR, PR that keeps its slots through tool calls, and verl's colocate_async, interleaved; 32 seats for 128 samples in flight.
# At learning rate 0: what is compared is time at equal work. A repeat of 10 steps takes a quarter of an hour (tests/studies/results/log.md).
#
#   bash tests/scripts/bench_agents_cpu.sh
#   bash tests/scripts/bench_agents_cpu.sh --arms noPR PR_quickstart --repeats 1
#   TOOL_MEDIAN_S=0.01 OUT=outputs/agents_quick bash tests/scripts/bench_agents_cpu.sh actor_rollout_ref.rollout.max_num_seqs=128   # plenty of seats, quick tools
#
# Arguments are those of tests.studies peers. OUT=dir (default outputs/agents) chooses where the runs go.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bash run_scripts/setup.sh --quiet
source run_scripts/env_cpu.sh
export PYTHONWARNINGS=ignore

out=${OUT:-outputs/agents}
options=() overrides=()
for word in "$@"; do
  if [[ $word == [!-]*=* ]]; then overrides+=("$word"); else options+=("$word"); fi
done
[[ " $* " == *" --arms "* ]] || options+=(--arms noPR PR_quickstart PR_slots_held PR_more v1_colocate_async_quick)
[[ " $* " == *" --steps "* ]] || options+=(--steps 10)
python -m recipe.partial_rollout.tasks.ready_start --out "$out/task"
exec python -m tests.studies peers "${options[@]}" --out "$out" \
  trainer.val_before_train=False trainer.test_freq=-1 \
  actor_rollout_ref.actor.optim.lr=0 \
  actor_rollout_ref.rollout.max_num_seqs=32 \
  actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent \
  actor_rollout_ref.rollout.multi_turn.enable=True \
  actor_rollout_ref.rollout.multi_turn.format=slow \
  actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3 \
  actor_rollout_ref.rollout.multi_turn.function_tool_path="$PWD/tests/studies/peers/slow_tool.py" \
  partial_rollout.overlap=1 \
  partial_rollout.deadlines.stall_s=900 "${overrides[@]}"
