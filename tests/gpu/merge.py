"""Tables of the experiments' figures: ``gpu_NAME.md`` for each experiment, and ``gpu_NAME.csv`` with every step."""

from __future__ import annotations

import csv
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from recipe.partial_rollout.tools.table import Table
from tests.gpu.figures import read

Figure = dict[str, Any]
_PARTS = ("rollout_s", "pass_s", "adv_s", "update_s", "sync_s", "step_s")
WARM_UP = {"noPR": 1, "PR": 2}
"""steps of a run that are left out: the engine compiles in the first, and PR's pipeline fills in the second"""


def run(options: Namespace) -> int:
    """Write the tables of all figures below the folders, and print them; 2 where there are none."""
    found = list(read(options.folders))
    if not found:
        print(f"no figures below {', '.join(map(str, options.folders))}", file=sys.stderr)
        return 2
    options.docs.mkdir(parents=True, exist_ok=True)
    for name, tabulate in TABLES.items():
        figures = [figure for figure in found if figure["experiment"] == name]
        if not figures:
            continue
        table = tabulate(figures)
        text = f"{table.markdown()}\n\nWritten by `python -m tests.gpu merge`.\n"
        (options.docs / f"gpu_{name}.md").write_text(text, encoding="utf-8")
        print(table.console())
        if steps := [figure for figure in figures if "step" in figure]:
            _write_csv(options.docs / f"gpu_{name}.csv", steps)
    return 0


def _write_csv(path: Path, figures: list[Figure]) -> None:
    names = list(dict.fromkeys(name for figure in figures for name in figure))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(figures)


def pair(figures: list[Figure]) -> Table:
    """Microseconds a trained token of each part, without the warm-up."""
    by_arm = {
        arm: [each for each in figures if each["arm"] == arm and each.get("step", 0) > WARM_UP[arm]] for arm in WARM_UP
    }
    rows = []
    for part in _PARTS:
        costs = {arm: _per_token(steps, part) for arm, steps in by_arm.items()}
        ratio = costs["PR"] / costs["noPR"] if costs["PR"] is not None and costs["noPR"] else None
        rows.append([part.removesuffix("_s"), *(_shown(costs[arm], ".1f") for arm in WARM_UP), _shown(ratio, ".2f")])
    more: dict[str, Callable[[Figure], float]] = {
        "longest response over the mean": lambda each: each["longest"] / each["mean"],
        "seconds to interrupt": lambda each: each["interrupt_s"],
        "mean staleness": lambda each: each["staleness"],
        "MFU of the update": lambda each: each["mfu_update"],
    }
    for name, value in more.items():
        rows.append([name, *(_range(by_arm[arm], value) for arm in WARM_UP), ""])
    rows.append(["steps", *(str(len(by_arm[arm])) for arm in WARM_UP), ""])
    return Table("PR against noPR, microseconds a trained token", ["", *WARM_UP, "PR / noPR"], rows)


def update(figures: list[Figure]) -> Table:
    """Medians of each variant."""
    header = ["variant", "tokens", "pass, s", "MFU", "update, s", "MFU", "optimizer, s", "time in kernels", "GiB"]
    rows = []
    for each in figures:
        if "error" in each:
            rows.append([each["variant"], each["error"], *[""] * 7])
        elif each.get("median"):
            shares = ", ".join(f"{kind} {share:.0%}" for kind, share in each["kernel_shares"].items())
            numbers = ("pass_s", "pass_mfu", "update_s", "update_mfu", "optimizer_s")
            shown = [f"{each[name]:.3f}" for name in numbers]
            rows.append([each["variant"], f"{each['tokens']:,}", *shown, shares, _shown(each["gib"], ".1f")])
    return Table("An update on the pair's lengths", header, rows)


def learn(figures: list[Figure]) -> Table:
    """Seconds of training until the wanted reward, by arm."""
    rows = []
    for arm in dict.fromkeys(each["arm"] for each in figures):
        steps = [each for each in figures if each["arm"] == arm]
        validated = [each for each in steps if each["held_out"] is not None]
        reached = next((each for each in steps if each["reached"]), None)
        seconds = f"{reached['trained_s']:.0f} s, step {reached['step']}" if reached else "not reached"
        best = f"{max(each['held_out'] for each in validated):.3f}" if validated else ""
        later = [each["step_s"] for each in steps if each["step"] > 1]
        step = f"{median(later):.2f}" if later else ""
        rows.append([arm, f"{steps[0]['wanted']:g}", seconds, best, str(len(steps)), step])
    header = ["", "wanted", "reached after", "best held-out reward", "steps", "median step, s"]
    return Table("SmolLM2 counts", header, rows)


def images(figures: list[Figure]) -> Table:
    """As ``pair``'s, with held-out rewards, and whether the trainer sees the pictures that the engine has seen."""
    speed = pair(figures)
    rewards, differences = ["held-out reward, first to last"], ["difference of probabilities, step 1"]
    for arm in WARM_UP:
        steps = [each for each in figures if each["arm"] == arm]
        validated = [each["held_out"] for each in steps if each["held_out"] is not None]
        rewards.append(f"{validated[0]:.3f} to {validated[-1]:.3f}" if validated else "")
        differences.append(_shown(steps[0]["probs_diff"], ".1e") if steps else "")
    return Table(f"Pictures: {speed.title}", speed.header, [*speed.rows, [*rewards, ""], [*differences, ""]])


def accept(figures: list[Figure]) -> Table:
    """A row a test."""
    rows = [[each["test"], each["outcome"], f"{each['seconds']:g}", each["error"]] for each in figures]
    return Table("Acceptance", ["test", "outcome", "s", "error"], rows)


def newest(figures: list[Figure]) -> Table:
    """A row a release."""
    rows = [[each["vllm"], str(each.get("refused") or each.get("error") or f"step {each['step']}")] for each in figures]
    return Table("Releases of vLLM", ["vLLM", "what came of it"], rows)


TABLES: dict[str, Callable[[list[Figure]], Table]] = {
    each.__name__: each for each in (pair, update, learn, accept, images, newest)
}
"""by experiment"""


def _per_token(steps: list[Figure], part: str) -> float | None:
    tokens = sum(each["tokens"] for each in steps)
    return 1e6 * sum(each[part] for each in steps) / tokens if tokens else None


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _range(steps: list[Figure], of: Callable[[Figure], float]) -> str:
    """The median, and what it lies between; empty where the steps have no such figure."""
    try:
        values = sorted(of(each) for each in steps)
        return f"{median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})" if values else ""
    except TypeError:
        return ""
