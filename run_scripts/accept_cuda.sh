#!/usr/bin/env bash
# GPU acceptance on one device: random weights of Qwen3-0.6B shape, response lengths from a long-tailed trace, noPR against PR
# through the same entry point with sleep mode, CUDA IPC weight sync and CUDA graphs; then the report.
#
#   bash run_scripts/accept_cuda.sh                         train and roll out
#   SPECULATIVE=ngram bash run_scripts/accept_cuda.sh       also: does vLLM's proposer change what is sampled?
#   SHAPE=4b OUT=outputs/accept_4b bash run_scripts/accept_cuda.sh actor_rollout_ref.actor.optim.lr=0.0
#
# NOT RUN YET: no GPU was available; docs/gpu.md will hold the figures.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v nvidia-smi >/dev/null || { echo "accept_cuda: nvidia-smi not found: this needs an NVIDIA GPU" >&2; exit 2; }
PARTIAL_ROLLOUT_EXTRA=gpu bash run_scripts/setup.sh --quiet
# shellcheck source=/dev/null
source "${PARTIAL_ROLLOUT_VENV:-.venv}/bin/activate"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore

out=${OUT:-outputs/accept_cuda}
python -m recipe.partial_rollout.tasks.trace_task.prepare --out "$out/task" --shape "${SHAPE:-0.6b}"
for arm in noPR PR; do
  enable=True
  [[ $arm == PR ]] || enable=False
  rm -rf "${out:?}/$arm"
  python -m recipe.partial_rollout.main_ppo --config-name accept_cuda accept.dir="$out" \
    trainer.experiment_name="$arm" partial_rollout.enable="$enable" "$@"
done
python -m recipe.partial_rollout.tools report "$out/noPR" "$out/PR" --out "$out"
if [[ -n "${SPECULATIVE:-}" ]]; then
  python -m recipe.partial_rollout.tools bench distribution --method "$SPECULATIVE" --dtype bfloat16 \
    --model "$out/task/model" --data "$out/task/data/val.parquet"
fi
