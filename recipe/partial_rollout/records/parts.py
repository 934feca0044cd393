"""What a run wrote down, as frozen records. Times are unix seconds."""

from dataclasses import dataclass, field
from enum import StrEnum


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
class Call:
    """One engine call."""

    replica: int
    start: float
    end: float
    tokens: int
    """Tokens that it decoded."""
    version: int
    resumed_tokens: int = 0
    """Tokens that it had to read again because its sample was interrupted."""
    context_tokens: int | None = None
    """Of the prompt and the response so far, at its start; None: the run did not note it."""
    queued_s: float = 0.0
    """Seconds for which it waited in the engine before it ran; 0 where the run did not note it."""


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """One prompt with its samples, at the moment it is trained."""

    index: int
    """Dispatch order over the whole run, from 0."""
    prompt: str
    epoch: int
    lengths: list[int]
    """[sample], in tokens."""
    staleness: list[int]
    """[sample], in versions."""
    segments: list[int]
    """[sample]"""
    tokens: int
    off_policy_tokens: int


@dataclass(frozen=True, slots=True)
class Round:
    """One rollout phase, from its start until every replica is quiet."""

    step: int
    version: int
    start: float
    end: float
    calls: list[Call] = field(repr=False)
    trained: list[TrainedGroup] = field(repr=False)
    interrupt_s: float | None
    resume_s: float | None
    carried_groups: int
    lost_samples: int
    """A level, not an increase: how many samples are unaccounted for."""

    @property
    def decoded_tokens(self) -> int:
        return sum(call.tokens for call in self.calls)


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
