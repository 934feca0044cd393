"""``python -m tests.gpu pack``, ``run NAME --out DIR``, ``merge DIR...``: experiments for a few minutes of one GPU.

On the machine with the GPU ``run`` first unpacks what was carried there; until then only the standard library is there.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from tests.gpu import parts

EXPERIMENTS = {
    "pair": "noPR and PR in turn, a long tail: rollout, pass, update, step, interruption",
    "update": "the update alone, packed, with and without use_liger: MFU of each part",
    "learn": "SmolLM2 counts, PR against noPR to a fixed reward",
    "accept": "the acceptance: pytest -m gpu",
    "images": "a tiny Qwen3-VL reads pictures, PR against noPR",
    "newest": "another release of vLLM, or the error that refuses it",
}
"""by name, in the order of their worth"""
SCRATCH = Path("/tmp/gpu")
MINUTES = 7
ENVIRONMENT = {
    # vLLM would import FlashInfer, which is not carried, and die after 200 s.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
_UNPACKED = "PARTIAL_ROLLOUT_GPU_UNPACKED"


def main(arguments: list[str] | None = None) -> int:
    """Run one command."""
    options = _parser().parse_args(arguments)
    return _run(options) if options.act == "run" else importlib.import_module(f"tests.gpu.{options.act}").run(options)


def _run(options: argparse.Namespace) -> int:
    options.scratch = options.scratch.absolute()
    options.out = (options.out or options.scratch / "out" / options.name).absolute()
    if _UNPACKED not in os.environ:
        folders = {"packages": options.scratch / "site", "smollm2": options.scratch / "smollm2_site"}
        try:
            found = [str(folder) for name, folder in folders.items() if parts.unpack(name, options.scratch, folder)]
        except parts.PartsError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        paths = [os.getcwd(), *found, *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {**ENVIRONMENT, _UNPACKED: "1", "PYTHONPATH": ":".join(paths)}
        if options.tiny:
            own["VERL_PLATFORM"] = "cpu"
        command = [sys.executable, "-W", "ignore", "-m", "tests.gpu", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **own})
    from tests.gpu.figures import Figures

    return importlib.import_module(f"tests.gpu.{options.name}").run(options, Figures(options.name, options.out))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    acts = parser.add_subparsers(dest="act", required=True, metavar="ACT")
    pack = acts.add_parser("pack", help="write what must travel, in parts that each fit one call")
    pack.add_argument("--out", type=Path, default=Path(".gpu"), help="folder of the parts (default: .gpu)")
    run = acts.add_parser(
        "run",
        help="run one experiment",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:<8}{does}" for name, does in EXPERIMENTS.items()),
    )
    run.add_argument("name", choices=EXPERIMENTS, metavar="NAME", help="one of those below")
    run.add_argument("--out", type=Path, help="folder of the figures")
    run.add_argument("--tiny", action="store_true", help="the same code in a minute, on a CPU")
    run.add_argument("--stacks", action="store_true", help="sample the stacks of driver and engine every 20 ms (pair)")
    run.add_argument("--seconds", type=float, default=60 * MINUTES, help="time of trainings, their starts included")
    run.add_argument("--repeats", type=int, default=99, help="pairs of trainings, at most (pair)")
    run.add_argument("--arms", nargs="+", choices=("noPR", "PR"), help="run these alone (pair, learn, images)")
    for each in (pack, run):
        each.add_argument("--scratch", type=Path, default=SCRATCH, help=f"folder of all else (default: {SCRATCH})")
        each.add_argument("--vllm", metavar="RELEASE", help="vLLM's release, in place of the lock file's")
    merge = acts.add_parser("merge", help="write the tables of tests/studies/results from the figures")
    merge.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders of figures")
    merge.add_argument("--docs", type=Path, default=Path("tests/studies/results"), help="where the tables go")
    return parser


if __name__ == "__main__":
    sys.exit(main())
