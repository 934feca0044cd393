#!/usr/bin/env bash
# Inflicts eight faults on a small real training at random moments, resumes and audits it; writes outputs/chaos/chaos.json.
#
#   bash run_scripts/chaos_cpu.sh                       # eight faults of four kinds, seed 0
#   bash run_scripts/chaos_cpu.sh --faults 5 --kinds kill --seed 7
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash run_scripts/setup.sh --quiet
source run_scripts/env_cpu.sh

out=outputs/chaos
rm -rf "$out"
python -m recipe.partial_rollout.tasks.ready_start --out outputs/quickstart/task
exec python -m tests.chaos --out "$out" "$@" quickstart_cpu \
  data.train_batch_size=8 data.train_max_samples=192 data.max_response_length=1024 \
  trainer.total_training_steps=null partial_rollout.max_staleness=4 partial_rollout.overlap=1.0 \
  partial_rollout.probe_s=0 'trainer.logger=[file]'
