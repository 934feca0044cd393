# shellcheck shell=bash
# The environment of a run without a GPU, sourced by the other scripts. Variables that are set keep the caller's value.

export VERL_PLATFORM=cpu

# vLLM on a CPU: 1 GiB of KV cache, threads left to the scheduler, one OpenMP thread a process (the processes share the cores).
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM=false

# Nothing leaves the machine: no model hub, no usage reports. SwanLab logs to the cloud only where the user has a key.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
export RAY_USAGE_STATS_ENABLED=0
export VLLM_NO_USAGE_STATS=1
export DO_NOT_TRACK=1
export HF_HUB_DISABLE_TELEMETRY=1

export PYTHONUNBUFFERED=1

# shellcheck source=/dev/null
source "$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)/${PARTIAL_ROLLOUT_VENV:-.venv${PARTIAL_ROLLOUT_VLLM:+-vllm-$PARTIAL_ROLLOUT_VLLM}}/bin/activate"
