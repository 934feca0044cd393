"""``python -m tests.studies.quorum [1] [2]``: the rows of ``results/quorum_rounds.tsv`` and ``quorum_advantages.tsv``."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from recipe.partial_rollout.tools.planner.engine_curve import PRESETS, EngineCurve
from recipe.partial_rollout.tools.planner.lengths import LengthTrace
from recipe.partial_rollout.tools.run_record import load_run
from tests.studies.quorum.estimators import ALGORITHMS, ESTIMATORS, trained
from tests.studies.quorum.groups import Responses, careful, made_up, of_size, sampled
from tests.studies.quorum.rounds import Batch, Job, Share, play

QUICK = EngineCurve(3.68e-3, 1.26e-4)
"""fitted to the quick start's noPR run"""
SMOLLM = EngineCurve(5.25e-2, 5.9e-3)
"""fitted to that of results/smollm_noPR"""
WHOLE = (0.25, 0.375, 0.5, 0.75, 1.0, 1.25, 1.5)
OVERLAPS = (0.25, 0.5, 0.75, 1.0)
_ROUNDS = (
    *("lengths", "n", "quorum", "overlap", "rollout / noPR", "staleness mean / max"),
    *("over whole groups, equal staleness", "equal token age", "stragglers", "their length", "shares of one sample"),
    *("groups in one batch", "steps until whole, mean / most", "groups a batch / N", "spread of its mean length"),
    "length of the first five",
)
_ADVANTAGES = (
    *("groups", "n", "quorum", "stragglers", "reward of early ones", "of stragglers", "algorithm", "estimator"),
    *("bias", "early", "stragglers", "worst decile of lengths", "spread of deciles", "variance", "correlation"),
)


def traces(n: int) -> dict[str, tuple[Job, np.ndarray]]:
    """Jobs and lengths [rows, n] of gate 1, for groups of ``n``."""
    found = {"quick start's warm start": (Job(8, n, QUICK, keeps_kv=True), of_size(sampled("quick"), n)[0])}
    if n == 16:
        job, lengths = found["quick start's warm start"]
        found["the same, bound 16"] = (replace(job, max_staleness=16), lengths)
    if n == 4:
        run = load_run(Path(__file__).parents[1] / "results" / "smollm_noPR")
        found["SmolLM2's run"] = (Job(8, n, SMOLLM), LengthTrace.of_run(run).groups)
    else:
        found["SmolLM2"] = (Job(8, n, SMOLLM), of_size(sampled("smollm"), n)[0])
    curve = PRESETS["h20-qwen3-4b" if n == 8 else "h100-qwen3-4b"]
    for name, median in ("lognormal", 3000), ("lognormal, longer tail", 2200):
        lengths = LengthTrace.lognormal(median=median, mean=3627, cap=18384, samples_per_group=n, groups=2048).groups
        found[name] = (Job(512 // n, n, curve, replicas=16, prompt_tokens=100), lengths)
    return found


def _figures(job: Job, lengths: np.ndarray, quorum: int, overlap: float, rounds: int, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    order = (int(rng.integers(len(lengths))) for _ in itertools.count())
    filling = 4 + int(np.ceil(4 * overlap))
    played = list(itertools.islice(play(job, lengths, quorum, overlap, order), filling + rounds))
    steady, first = played[filling:], played[:5]
    tokens = sum(int(batch.lengths.sum()) for batch in steady)
    shares = [share for batch in steady for share in batch.shares]
    late = [share for share in shares if share.begun]
    size = job.batch_groups * job.n
    return {
        "ms": 1e3 * sum(batch.seconds for batch in steady) / tokens,
        "staleness": float(np.concatenate([batch.staleness for batch in steady]).mean()),
        "max": max(int(batch.staleness.max()) for batch in played),
        "age": sum(batch.token_ages for batch in steady) / tokens,
        "late": sum(len(share.samples) for share in late) / (rounds * size),
        "late length": _mean_length(late, lengths) / lengths.mean(),
        "groups": len(shares) / rounds / job.batch_groups,
        "alone": sum(len(share.samples) == 1 for share in shares) / len(shares),
        "spread": float(np.std([b.lengths.mean() for b in steady]) / np.mean([b.lengths.mean() for b in steady])),
        "first": float(np.mean([batch.lengths.mean() for batch in first]) / lengths.mean()),
        **_whole(played, job.n, filling),
    }


def _mean_length(shares: list[Share], lengths: np.ndarray) -> float:
    found = [lengths[share.group.at, list(share.samples)] for share in shares]
    return float(np.concatenate(found).mean()) if found else 0.0


def _whole(played: list[Batch], n: int, filling: int) -> dict[str, float]:
    """Steps between the first and the last share of a group."""
    begun, ended = {}, {}
    for version, batch in enumerate(played):
        for share in batch.shares:
            begun.setdefault(share.group.order, version)
            if len(share.group.trained) == n:
                ended[share.group.order] = version
    steps = [ended[g] - begun[g] for g in ended if filling <= begun[g] < len(played) - 8]
    return {"steps": float(np.mean(steps)), "in one": float(np.mean(np.array(steps) == 0)), "most": max(steps)}


def gate_1(rounds: int, seeds: int) -> None:
    """Rollout time of quorums over that of whole groups with the same staleness."""
    print(*_ROUNDS, sep="\t")
    for n, quorums in (4, (4, 3, 2)), (8, (8, 7, 6, 5, 4, 1)), (16, (16, 14, 12, 10, 8, 1)):
        for name, (job, lengths) in traces(n).items():
            count = rounds if job.batch_groups == 8 else rounds // 4

            def mean(quorum: int, overlap: float, job=job, lengths=lengths, count=count) -> dict[str, float]:
                found = [_figures(job, lengths, quorum, overlap, count, seed) for seed in range(seeds)]
                return {key: float(np.mean([each[key] for each in found])) for key in found[0]}

            sync = mean(n, 0.0)["ms"]
            curve = [{"ms": sync, "staleness": 0.0, "age": 0.0}, *(mean(n, overlap) for overlap in WHOLE)]
            for quorum in quorums:
                for overlap in OVERLAPS:
                    row = mean(quorum, overlap)
                    over = [
                        row["ms"] / np.interp(row[key], [w[key] for w in curve], [w["ms"] for w in curve])
                        for key in ("staleness", "age")
                    ]
                    cells = [name, n, quorum, overlap, f"{row['ms'] / sync:.2f}"]
                    cells += [f"{row['staleness']:.2f} / {row['max']:.0f}", *(f"{share:.3f}" for share in over)]
                    cells += [f"{row[key]:.2f}" for key in ("late", "late length", "alone", "in one")]
                    cells += [f"{row['steps']:.1f} / {row['most']:.0f}"]
                    cells += [f"{row[key]:.2f}" for key in ("groups", "spread", "first")]
                    print(*cells, sep="\t", flush=True)


def gate_2(versions: int, seeds: int) -> None:
    """Bias and variance of the advantages, in standard deviations of the whole group's."""
    quick, later = sampled("quick"), careful()
    both = np.concatenate([quick[0], later[0]]), np.concatenate([quick[1], later[1]])
    sources: dict[str, tuple[Responses, bool]] = {
        "quick start's warm start": (quick, False),
        "the quick start's policy becomes careful": (both, True),
        "SmolLM2": (sampled("smollm"), False),
        "long ones fail": (made_up(), False),
        "SmolLM2, letters": (sampled("smollm", "letter_counting"), False),
        "SmolLM2, sentences": (sampled("smollm", "sentence_reordering"), False),
    }
    quorums = (8, 6), (8, 5), (16, 12), (16, 10)
    print(*_ADVANTAGES, sep="\t")
    for (name, (groups, drift)), (n, quorum) in itertools.product(sources.items(), quorums):
        _gate_2(name, of_size(groups, n), n, quorum, 48 if drift else versions, 3 * seeds if drift else seeds, drift)


def _gate_2(name: str, groups: Responses, n: int, quorum: int, versions: int, seeds: int, drift: bool) -> None:
    samples = trained(groups, n, quorum, 0.5, versions, seeds, drift)
    lengths, rewards = groups
    at, index, late = np.array(samples.at), np.array(samples.index), np.array(samples.late)
    length, reward = lengths[at, index], rewards[at, index]
    figures = np.array(samples.figures).reshape(len(at), len(ESTIMATORS) + 1, 2, 2)
    batch = np.array(samples.seed) * 10_000 + np.array(samples.version)
    # Groups that are trained to the end, so that each length has its weight; the first batches lack stragglers.
    group = np.array(samples.seed) * 1_000_000 + np.array(samples.group)
    _, which, counts = np.unique(group, return_inverse=True, return_counts=True)
    use = (counts[which] == n) & (np.array(samples.version) >= (0 if drift else 5))
    decile = np.searchsorted(np.quantile(length[use], np.linspace(0, 1, 11)[1:-1]), length)
    parts = [use & (decile == part) for part in range(10) if (use & (decile == part)).any()]
    for algorithm in ALGORITHMS:
        advantage = _advantages(algorithm, reward, length, batch, figures)
        whole = advantage(0)
        for place, estimator in enumerate(ESTIMATORS, start=1):
            if estimator == "history" and algorithm == "grpo":
                continue  # of rewards that are all equal it has no standard deviation
            found = advantage(place)
            off = (found - whole) / whole[use].std()
            by_length = np.array([off[part].mean() for part in parts])
            cells = [
                name,
                n,
                quorum,
                f"{late[use].mean():.2f}",
                *(f"{reward[part].mean():.2f}" for part in (use & ~late, use & late)),
            ]
            cells += [algorithm, estimator, *(f"{off[part].mean():+.3f}" for part in (use, use & ~late, use & late))]
            cells += [f"{by_length[np.abs(by_length).argmax()]:+.3f}", f"{(by_length - off[use].mean()).std():.3f}"]
            cells += [f"{found[use].var() / whole[use].var():.2f}", f"{np.corrcoef(found[use], whole[use])[0, 1]:.3f}"]
            print(*cells, sep="\t", flush=True)


def _advantages(
    algorithm: str, reward: np.ndarray, length: np.ndarray, batch: np.ndarray, figures: np.ndarray
) -> Callable[[int], np.ndarray]:
    own = int(algorithm == "rloo")

    def advantage(place: int) -> np.ndarray:
        found = reward - figures[:, place, own, 0]
        if algorithm == "grpo":
            return found / (figures[:, place, own, 1] + 1e-6)
        if algorithm == "reinforce_plus_plus_baseline":
            _, which = np.unique(batch, return_inverse=True)
            tokens = np.bincount(which, length)
            found = found - (np.bincount(which, length * found) / tokens)[which]
            found = found / np.sqrt((np.bincount(which, length * found**2) / tokens)[which] + 1e-8)
        return found

    return advantage


if __name__ == "__main__":
    if "1" in sys.argv[1:] or len(sys.argv) == 1:
        gate_1(rounds=120, seeds=2)
    if "2" in sys.argv[1:] or len(sys.argv) == 1:
        gate_2(versions=100, seeds=4)
