#!/usr/bin/env bash
# Writes requirements-gpu.txt: everything that the extras `gpu` and `dev` of pyproject.toml bring onto a Linux machine with an NVIDIA
# GPU, pinned. What is pinned there already stays. Needs uv (it is in .venv) and a package index; installs nothing.
#
#   bash tests/scripts/lock_gpu.sh [--upgrade]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PATH=$PATH:$PWD/.venv/bin
command -v uv >/dev/null || { printf 'lock_gpu: uv is not installed: pip install uv\n' >&2; exit 1; }

part=requirements-gpu.txt.part
trap 'rm -f "$part"' EXIT
cp requirements-gpu.txt "$part"
# One file for both Pythons: the older one's versions run on the newer one, but for setuptools, which vLLM bounds on 3.12 only.
uv pip compile --quiet --no-header --no-annotate --extra gpu --extra dev --python-version 3.11 "$@" \
  --python-platform x86_64-unknown-linux-gnu --constraint <(printf 'setuptools<81\n') --output-file "$part" pyproject.toml >/dev/null
{
  cat <<'END'
# The whole environment of a Linux machine with an NVIDIA GPU (x86-64, CUDA 13), pinned, for Python 3.11 and 3.12. bash tests/scripts/lock_gpu.sh
# writes it; run_scripts/setup.sh installs it without dependencies. On a GPU a part of it has run: docs/gpu.md.
END
  cat "$part"
} >requirements-gpu.txt.new
mv requirements-gpu.txt.new requirements-gpu.txt
