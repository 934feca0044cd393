"""What a run wrote down, as frozen records. Times are unix seconds."""

from dataclasses import dataclass, field
from enum import StrEnum

from recipe.partial_rollout.records.round import Round
from recipe.partial_rollout.records.trained_group import TrainedGroup


class Arm(StrEnum):
    """Which trainer ran."""

    NOPR = "noPR"
    PR = "PR"


@dataclass(frozen=True, slots=True)
class RunSettings:
    """`run.json`."""

    arm: Arm
    experiment: str
    batch_groups: int
    """Groups that one step trains (N)."""
    samples_per_group: int
    """Samples of one group (n)."""
    replicas: int
    slots_per_replica: int
    """Samples that one replica can run at a time."""
    max_staleness: int | None
    mode: str
    policy: str
    verl: str
    vllm: str
    complete: bool
    """False while the run goes on, and for ever if it crashed."""

    @property
    def full_concurrency(self) -> int:
        """Running samples with no slot wasted: a whole batch, or every slot where the batch is larger."""
        return min(self.batch_groups * self.samples_per_group, self.replicas * self.slots_per_replica)


@dataclass(frozen=True, slots=True)
class Probe:
    """The engines' speed when kept full, measured in the run itself through the same path."""

    tokens_per_s: float
    concurrency: int


@dataclass(frozen=True, slots=True)
class Phase:
    """Anything else that took time between rounds."""

    step: int
    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Step:
    """One training step: its round and what verl logged for it."""

    round: Round
    metrics: dict[str, float] = field(repr=False)

    @property
    def number(self) -> int:
        return self.round.step

    def seconds(self, phase: str) -> float:
        """verl's timer of that name; 0 where the step has no such phase."""
        return self.metrics.get(f"timing_s/{phase}", 0.0)

    @property
    def lengths(self) -> list[int]:
        """[trained sample]"""
        return [length for group in self.round.trained for length in group.lengths]

    @property
    def staleness(self) -> list[int]:
        """[trained sample]"""
        return [age for group in self.round.trained for age in group.staleness]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run. `steps` are ascending, at least one, each number once."""

    directory: str
    settings: RunSettings
    steps: list[Step]
    probes: list[Probe]
    phases: list[Phase]
    warnings: list[str]

    @property
    def rounds(self) -> list[Round]:
        return [step.round for step in self.steps]

    @property
    def trained_groups(self) -> list[TrainedGroup]:
        """In the order of training."""
        return [group for step in self.steps for group in step.round.trained]
