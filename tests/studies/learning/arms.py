"""Arms of ``tests.studies learning``: noPR, verl's ``colocate_async``, PR by policy, overlap, loss, correction and eta."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tests.studies.arm import BASELINE, Arm
from tests.studies.learning import delayed_weights, stale_negatives
from tests.studies.learning.stale_negatives import Candidate
from tests.studies.peers.arms import ARMS as PEERS

LR = "actor_rollout_ref.actor.optim.lr"
COMMON = (
    "trainer.logger=[file]",
    # 512 responses a validation: 64 held-out prompts, 8 samples each
    "actor_rollout_ref.rollout.val_kwargs.n=8",
    "trainer.test_freq=6",
    # The last rounds are like all others: at equal steps every arm leaves its spare groups in flight.
    "partial_rollout.drain=False",
    # What an arm's name does not say is off, whatever the defaults are.
    "partial_rollout.trust_region=none",
)
"""for all arms, on top of the quick start's config"""

_POLICY, _OVERLAP = "partial_rollout.scheduling.policy", "partial_rollout.overlap"


def _bounded(overlap: float) -> Arm:
    overrides = (f"{_POLICY}=bounded", f"{_OVERLAP}={overlap:g}")
    return Arm(f"PR_bounded_{overlap:g}", f"PR, bounded, overlap {overlap:g}", overrides)


def _within(arm: Arm, staleness: int) -> Arm:
    overrides = (*arm.overrides, f"partial_rollout.max_staleness={staleness}")
    return Arm(f"{arm.name}_within_{staleness}", f"{arm.caption}, staleness {staleness}", overrides)


def _overtaking(share: float, overlap: float) -> Arm:
    overrides = (f"partial_rollout.scheduling.overtake={share:g}", f"{_OVERLAP}={overlap:g}")
    caption = f"PR, overtaking {share:g} N, overlap {overlap:g}"
    return Arm(f"PR_overtake_{share:g}_{overlap:g}", caption, overrides)


ETAS = (1, 2, 4, 8, 16, "unbounded")
"""AReaL's, beside 0, which is noPR"""
ESTIMATORS = {
    "rloo": "RLOO",
    "reinforce_plus_plus": "REINFORCE++",
    "reinforce_plus_plus_baseline": "REINFORCE++ with a baseline",
    "grpo_passk": "GRPO_PASSK",
    "opo": "OPO",
    "gpg": "GPG",
    "gspo": "GSPO",
    "sapo": "SAPO",
}
"""file of ``conf/algorithm`` -> caption"""
UPDATED = "_update"


def _eta(eta: int | str) -> Arm:
    """Of AReaL's ablation (arXiv 2505.24298): what its bound on staleness costs and buys, with and without its loss.

    AReaL has one knob, eta: it admits as many samples as can be trained within eta versions, so eta is both window and
    bound. AReaL's samples can pass its bound; these cannot. The rollout seconds of these arms are the trainer's waits:
    compare whole steps. At eta 0 all losses are the same, with noPR's samples. Unbounded, what is in flight is still
    limited: as at eta 16, as AReaL limits its concurrent rollouts.
    """
    in_flight, bound = (16, 1000) if eta == "unbounded" else (eta, eta)
    overrides = (
        "partial_rollout.placement=separate",
        f"{_OVERLAP}={in_flight}",
        f"partial_rollout.max_staleness={bound}",
        "partial_rollout.correction=decoupled",
    )
    return Arm(f"PR_eta_{eta}", f"PR, separate, eta {eta}", overrides)


def _delayed(versions: int) -> Arm:
    """Synchronous rollouts of weights that are ``versions`` old: age alone, without mixing and selection."""
    overrides = (
        f"{_OVERLAP}=0",
        "partial_rollout.max_staleness=0",
        f"actor_rollout_ref.model.external_lib={delayed_weights.__name__}",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.{delayed_weights.VERSIONS}='{versions}'",
    )
    return Arm(f"PR_delayed_{versions}", f"synchronous, weights {versions} versions old", overrides)


def _less_pushed(arm: Arm, candidate: Candidate) -> Arm:
    """``arm`` with a candidate against its collapse."""
    overrides = (
        f"actor_rollout_ref.model.external_lib={stale_negatives.__name__}",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.{stale_negatives.CANDIDATE}={candidate}",
    )
    return Arm(f"{arm.name}_{candidate}", f"{arm.caption}, candidate {candidate}", (*arm.overrides, *overrides))


_CHANGES = {
    "mask": ("trust region mask", "partial_rollout.trust_region=mask"),
    "uncorrected": ("correction=none", "partial_rollout.correction=none"),
    "recompute": ("resume_kv=recompute", "partial_rollout.resume_kv=recompute"),
    "seq_mean": ("seq-mean-token-mean", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"),
    "decay": ("cosine decay", "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"),
}
"""what an arm may change in another, by the end of its name: a caption, and one override"""


def _changed(arm: Arm, *names: str) -> Arm:
    """``arm`` with all of these changes."""
    for name in names:
        caption, override = _CHANGES[name]
        arm = Arm(f"{arm.name}_{name}", f"{arm.caption}, {caption}", (*arm.overrides, override), arm.program)
    return arm


_UNMASKED = _changed(_within(_bounded(1.0), 4), "recompute")
_DEFAULT = _changed(_UNMASKED, "mask")
_QUICK = _changed(_bounded(1.5), "mask")


def _of_estimator(arm: Arm, name: str) -> Arm:
    """``arm`` with another estimator or loss; PR's trust region is what the recipe chooses for it."""
    side = arm.name.partition("_")[0]
    overrides = (*arm.overrides, f"algorithm={name}", "partial_rollout.trust_region=auto")
    return Arm(f"{side}_{name}", f"{side}, {ESTIMATORS[name]}", overrides)


_COLOCATE = next(arm for arm in PEERS if arm.name == "v1_colocate_async_quick")

ARMS = {
    arm.name: arm
    for arm in (
        BASELINE,
        _DEFAULT,
        _QUICK,
        *(_changed(arm, "decay") for arm in (BASELINE, _DEFAULT, _QUICK)),
        _bounded(1.5),
        _changed(_bounded(1.5), "recompute"),
        *(_changed(_bounded(1.5), "mask", name) for name in ("recompute", "seq_mean")),
        _changed(_overtaking(0, 2.0), "mask"),
        _overtaking(1.0, 2.0),
        *map(_eta, ETAS),
        *(_changed(_eta(eta), name) for eta in ETAS for name in ("uncorrected", "mask")),
        *(_changed(_eta(8), name) for name in ("recompute", "decay")),
        _changed(_eta(8), "mask", "decay"),
        *(
            _less_pushed(arm, each)
            for arm in (_eta(8), _changed(_eta(8), "mask"), _UNMASKED, _DEFAULT)
            for each in Candidate
        ),
        _delayed(8),
        _changed(_delayed(8), "mask"),
        replace(_COLOCATE, name="v1_colocate_async"),
        *(_of_estimator(arm, name) for name in ESTIMATORS for arm in (BASELINE, _DEFAULT)),
    )
}
"""by name; a run of one is called ``name@lr``. In ``results/`` their names end in ``UPDATED``; without it verl's pass over
the batch ran in every step"""
USUAL = (BASELINE.name, "PR_bounded_1.5", _QUICK.name)


def caption_of(name: str) -> str:
    """An arm in words; its name if this version of the study does not have it."""
    return ARMS[name].caption if name in ARMS else name


def at_rates(names: Iterable[str], rates: Iterable[float]) -> tuple[Arm, ...]:
    """The arms of these names, each at every learning rate."""
    rates = tuple(rates)
    return tuple(
        Arm(f"{name}@{rate:g}", ARMS[name].caption, (*ARMS[name].overrides, f"{LR}={rate:g}"), ARMS[name].program)
        for name in names
        for rate in rates
    )
