#!/usr/bin/env bash
# Inflicts faults on a small real training of conversations that change files, at random moments; resumes and audits it, and
# compares every workspace with that of a training that nothing disturbed. Writes outputs/chaos/faults/chaos.json.
#
#   bash tests/scripts/chaos_cpu.sh                       # nine faults, one of each kind, seed 0
#   bash tests/scripts/chaos_cpu.sh --faults 5 --kinds kill --seed 7
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bash run_scripts/setup.sh --quiet
source run_scripts/env_cpu.sh

out=outputs/chaos
[[ ! -e $out ]] || mv "$out" "$out.$(date +%s)"
python -m recipe.partial_rollout.tasks.ready_start --out outputs/quickstart/task
training=(
  quickstart_cpu
  data.train_batch_size=8 data.train_max_samples=192 data.max_response_length=1024 actor_rollout_ref.rollout.n=2
  trainer.total_training_steps=null partial_rollout.max_staleness=4 partial_rollout.overlap=1.0
  'trainer.logger=[file]'
  # Its agent loop decodes greedily, so that transcripts can be compared; such tokens cannot be corrected.
  partial_rollout.correction=none
)
python -m tests.chaos --out "$out/undisturbed" --faults 0 "${training[@]}"
exec python -m tests.chaos --out "$out/faults" --undisturbed "$out/undisturbed" "$@" "${training[@]}"
