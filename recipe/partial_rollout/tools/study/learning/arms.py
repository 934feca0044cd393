"""The arms of ``study learning``: noPR, verl's ``colocate_async``, and PR by policy, overlap, loss and correction."""

from __future__ import annotations

from collections.abc import Iterable

from recipe.partial_rollout.tools.study.arm import BASELINE, Arm
from recipe.partial_rollout.tools.study.peers.arms import ARMS as PEERS

LR = "actor_rollout_ref.actor.optim.lr"
COMMON = (
    "trainer.logger=[file]",
    # 512 responses a validation: 64 held-out prompts, 8 samples each
    "actor_rollout_ref.rollout.val_kwargs.n=8",
    "trainer.test_freq=6",
    "partial_rollout.probe_s=0",
    # The last rounds are like all others: at equal steps every arm leaves its spare groups in flight.
    "partial_rollout.drain=False",
)
"""for all arms, on top of the quick start's config"""


def _pr(name: str, caption: str, *overrides: str) -> Arm:
    return Arm(f"PR_{name}", f"PR, {caption}", tuple(f"partial_rollout.{override}" for override in overrides))


def _bounded(overlap: float, *overrides: str, suffix: str = "", caption: str = "") -> Arm:
    return _pr(
        f"bounded_{overlap:g}{suffix}",
        f"bounded, overlap {overlap:g}{caption}",
        "scheduling.policy=bounded",
        f"overlap={overlap:g}",
        *overrides,
    )


def _in_order(overlap: float, *overrides: str, suffix: str = "", caption: str = "") -> Arm:
    return _pr(
        f"in_order_{overlap:g}{suffix}",
        f"in_order, overlap {overlap:g}{caption}",
        "scheduling.policy=in_order",
        f"overlap={overlap:g}",
        *overrides,
    )


def _overtaking(share: float, overlap: float, *overrides: str, suffix: str = "", caption: str = "") -> Arm:
    return _pr(
        f"overtake_{share:g}_{overlap:g}{suffix}",
        f"overtaking {share:g} N, overlap {overlap:g}{caption}",
        "scheduling.policy=in_order",
        f"scheduling.overtake={share:g}",
        f"overlap={overlap:g}",
        *overrides,
    )


_COLOCATE = next(arm for arm in PEERS if arm.name == "v1_colocate_async_quick")

ARMS = {
    arm.name: arm
    for arm in (
        BASELINE,
        _pr("overlap_0", "overlap 0", "overlap=0", "max_staleness=0"),
        _bounded(0.75),
        _bounded(1.0),
        _bounded(1.5),
        _bounded(3.0),
        _in_order(0.75),
        _in_order(1.5),
        _in_order(2.0),
        _in_order(3.0),
        _in_order(4.0),
        _overtaking(0.5, 2.0),
        _overtaking(1.0, 1.5),
        _overtaking(1.0, 2.0),
        _overtaking(2.0, 1.5),
        Arm("v1_colocate_async", _COLOCATE.caption, _COLOCATE.overrides, _COLOCATE.program),
    )
}
"""by name; a run of one is called ``name@lr``"""
USUAL = (BASELINE.name, "PR_bounded_1.5", "PR_in_order_3")


def at_rates(names: Iterable[str], rates: Iterable[float]) -> tuple[Arm, ...]:
    """The arms of these names, each at every learning rate."""
    rates = tuple(rates)
    return tuple(
        Arm(f"{name}@{rate:g}", ARMS[name].caption, (*ARMS[name].overrides, f"{LR}={rate:g}"), ARMS[name].program)
        for name in names
        for rate in rates
    )


def caption_of(name: str) -> str:
    """An arm in words; its name if this version of the study does not have it."""
    return ARMS[name].caption if name in ARMS else name
