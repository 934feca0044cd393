"""Files of the repository that commands make; a unit test fails while one is out of date (CONTRIBUTING.md lists them).

python -m tests.generated keys FILE              renews the tables of keys in a Markdown file
python -m tests.generated warm_start TASK DIR    packs the warm start that ships, from a folder of ready_start --train
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np

from recipe.partial_rollout.config.keys import declarations
from recipe.partial_rollout.config.settings import ROOT, PartialRolloutConfig
from recipe.partial_rollout.tasks import ready_start
from recipe.partial_rollout.tools.keys import choices, default, meaning

FIRST = (
    "enable",
    "placement",
    "overlap",
    "max_staleness",
    "scheduling.policy",
    "slots_per_replica",
    "resume_kv",
    "trust_region",
)
"""keys that a user sets first"""
BEGIN, END = "<!-- {}: python -m tests.generated keys FILE -->", "<!-- /{} -->"
"""marks of a table; its name is ``keys`` for all, ``first keys`` for those of ``FIRST``, with their first sentence"""
_LEVELS = 127


def table(name):
    """The table ``name``, in Markdown."""
    first = name != "keys"
    chosen = {each.name: each for each in declarations(PartialRolloutConfig)}
    rows = []
    for each in [chosen[key] for key in FIRST] if first else chosen.values():
        stands_for = f" ({each.null})" if each.null else ""
        words = meaning(each)
        if first:
            one_of = ", ".join(f"`{choice}`" for choice in choices(each))
            words = re.split(r"(?<=\.) ", words)[0] + (f" One of {one_of}." if one_of else "")
        rows.append(f"| `{each.name}` | `{default(each)}`{stands_for} | {words} |")
    return "\n".join([f"| `{ROOT}.` | default | meaning |", "| --- | --- | --- |", *rows])


def with_tables(text):
    """``text`` with the tables between the marks that it has.

    Raises:
        ValueError: it has none.
    """
    if not any(BEGIN.format(name) in text for name in ("keys", "first keys")):
        raise ValueError(f"no table of keys: a file has one after {BEGIN.format('keys')}")
    for name in ("keys", "first keys"):
        begin, end = BEGIN.format(name), END.format(name)
        pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
        made = f"{begin}\n\n{table(name)}\n\n{end}"
        text = pattern.sub(made.replace("\\", r"\\"), text)
    return text


def quantise(weight):
    """int8 levels ``[rows, ...]`` and float32 scales ``[rows, 1, ...]``; their product is off by half a scale at most."""
    scale = np.abs(weight).max(axis=tuple(range(1, weight.ndim)), keepdims=True) / np.float32(_LEVELS)
    # Of a row of zeros, or of subnormal numbers, whose scale would be off by itself.
    scale[scale < np.finfo(np.float32).tiny] = 1
    return np.rint(weight / scale).astype(np.int8), scale.astype(np.float32)


def pack(task, file):
    """Write the weights and the manifest of the trained folder ``task`` to ``file``; the largest error of a weight."""
    from safetensors.numpy import load_file

    if (task / ready_start.ORIGIN).exists():
        raise ValueError(f"{task}: its weights were unpacked, not trained; train them with ready_start --train")
    manifest, weights = (
        json.loads((task / ready_start.MANIFEST).read_text()),
        load_file(task / "model/model.safetensors"),
    )
    stored = {}
    for name, weight in weights.items():
        if weight.ndim > 1:
            stored[name], stored[name + ready_start.SCALE] = quantise(weight)
        else:
            stored[name] = weight
    restored = ready_start.restore(stored)
    error = max(float(np.abs(restored[name] - weight).max()) for name, weight in weights.items())
    np.savez_compressed(file, allow_pickle=False, **stored, manifest=json.dumps(manifest), largest_error=error)
    return error


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.generated", description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("keys").add_argument("file", type=Path)
    packing = kinds.add_parser("warm_start")
    packing.add_argument("task", choices=ready_start.TASKS)
    packing.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.kind == "keys":
        options.file.write_text(with_tables(options.file.read_text()))
    else:
        file = ready_start.packed_file(options.task)
        error = pack(options.folder, file)
        print(f"{file}: {file.stat().st_size / 1e6:.2f} MB, no weight off by more than {error:.4f}")


if __name__ == "__main__":
    main()
