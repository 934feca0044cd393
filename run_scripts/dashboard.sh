#!/usr/bin/env bash
# Opens SwanLab's local board on runs of this machine, and prints its address. Ctrl-C ends it.
#
#   bash run_scripts/dashboard.sh                                the quick start's runs
#   bash run_scripts/dashboard.sh outputs/mine/PR                the board that a run logs to; or its swanlog directory
#   bash run_scripts/dashboard.sh outputs/mine/PR 5200           on another port than 5092 (or PORT=5200)
#
# HOST=0.0.0.0 lets other machines in; whoever reaches the port may read and delete the runs.
set -euo pipefail

asked=${1:-outputs/quickstart}
port=${2:-${PORT:-5092}}
host=${HOST:-127.0.0.1}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

die() {
  printf 'dashboard: %s\n' "$*" >&2
  exit 1
}

board=
# The quick start names its directory as seen from the root, wherever it is called from.
for directory in {"$asked","$root/$asked"}{,/swanlog,/../swanlog}; do
  if [[ -f $directory/runs.swanlab ]]; then
    board=$directory
    break
  fi
done
[[ -n $board ]] || die "$asked: no local board here (runs.swanlab); runs in the cloud are at swanlab.cn, and SWANLAB_MODE=local makes one"
[[ $port =~ ^[0-9]+$ ]] || die "port $port: a number"
if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
  die "port $port is taken: bash run_scripts/dashboard.sh $asked $((port + 1))"
fi

venv=$root/${PARTIAL_ROLLOUT_VENV:-.venv}/bin/activate
# shellcheck source=/dev/null
[[ ! -f $venv ]] || source "$venv"
command -v swanlab >/dev/null || die "swanlab is not installed: bash run_scripts/setup.sh"
printf 'dashboard: http://%s:%s/charts shows the runs of %s over each other\n' "$host" "$port" "$board"
exec swanlab watch "$board" --host "$host" --port "$port"
