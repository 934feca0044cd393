"""``run.json``: how a run was set up, and whether it reached its end."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from recipe.partial_rollout.config.choices import Placement
from recipe.partial_rollout.records.fields import RunRecordError, read_object

NAME = "run.json"


class Arm(StrEnum):
    """Which trainer ran."""

    NOPR = "noPR"
    PR = "PR"


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a reader of the run's other files must know."""

    arm: Arm
    experiment: str
    batch_groups: int
    """groups that one step trains (N)"""
    samples_per_group: int
    """samples in one group (n)"""
    replicas: int
    slots_per_replica: int
    """samples that one replica can run at a time"""
    max_staleness: int | None
    mode: str
    policy: str
    verl: str
    """version"""
    vllm: str
    """version"""
    overtake: float | None = None
    """``partial_rollout.scheduling.overtake``, a share of N; None: no limit, and under noPR"""
    placement: str = "colocated"
    """``partial_rollout.placement``"""
    complete: bool = False
    """whether the training reached its end"""

    @property
    def separate(self) -> bool:
        """Whether the engines decode while the trainer updates; a round's span is then the time from batch to batch."""
        return self.placement == Placement.SEPARATE

    @property
    def full_concurrency(self) -> int:
        """Running samples when no slot is wasted: a whole batch, or all slots if the batch is larger."""
        return min(self.batch_groups * self.samples_per_group, self.replicas * self.slots_per_replica)

    def write(self, directory: Path) -> None:
        """Write ``run.json`` in the run's directory."""
        (directory / NAME).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Self:
        """The inverse of ``write``.

        Raises:
            RunRecordError: the file cannot be read, or a field is missing, mistyped or out of range; names it.
        """
        fields = read_object(directory / NAME)
        arm = fields.text("arm")
        if arm not in list(Arm):
            raise RunRecordError(f"{fields.place}: 'arm' is {arm!r}; it should be one of {', '.join(Arm)}")
        return cls(
            arm=Arm(arm),
            experiment=fields.text("experiment"),
            batch_groups=fields.integer("batch_groups", least=1),
            samples_per_group=fields.integer("samples_per_group", least=1),
            replicas=fields.integer("replicas", least=1),
            slots_per_replica=fields.integer("slots_per_replica", least=1),
            max_staleness=fields.optional_integer("max_staleness"),
            mode=fields.text("mode"),
            policy=fields.text("policy"),
            verl=fields.text("verl"),
            vllm=fields.text("vllm"),
            overtake=fields.optional_number("overtake"),
            placement=fields.optional_text("placement") or "colocated",
            complete=fields.flag("complete"),
        )
