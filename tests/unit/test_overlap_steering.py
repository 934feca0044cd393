"""Who may change the overlap between two rounds: ``overlap=auto``, and drift."""

from recipe.partial_rollout.rollout.overlap_control import OverlapDecision
from recipe.partial_rollout.rollout.overlap_steering import OverlapChange, OverlapSteering


class Decides:
    """In place of ``OverlapControl``: gives these decisions, one a round."""

    def __init__(self, *overlaps):
        self.decisions = [overlap and OverlapDecision(overlap, 0.1, 0.1, "it pays") for overlap in overlaps]
        self.seen = []

    def poll(self):
        return self.decisions.pop(0) if self.decisions else None

    def observe(self, calls, lengths):
        self.seen.append(lengths)

    def metrics(self):
        return {"overlap_auto/target": 1.0}


def build_steering(overlap=1.5, *, control=None):
    return OverlapSteering(overlap, least=0.125, control=control)


def test_a_fixed_overlap_stays():
    steering = build_steering()

    assert steering.poll() is None
    assert steering.metrics() == {}


def test_drift_halves_it_once_each_time():
    steering = build_steering()

    steering.shrink("drift")
    assert steering.poll() == OverlapChange(0.75, "drift")
    assert steering.poll() is None
    steering.shrink("drift again")
    assert steering.poll() == OverlapChange(0.375, "drift again")


def test_less_than_a_group_is_none():
    steering = build_steering(0.2)

    steering.shrink("drift")

    assert steering.poll() == OverlapChange(0.0, "drift")
    steering.shrink("drift")
    assert steering.poll() is None


def test_auto_moves_it():
    steering = build_steering(1.0, control=Decides(None, 1.25))

    assert steering.poll() is None
    assert steering.poll() == OverlapChange(1.25, "it pays")


def test_auto_stays_below_what_drift_has_left():
    steering = build_steering(1.0, control=Decides(None, 0.75, 0.25, 0.75))

    steering.shrink("drift")

    assert steering.poll() == OverlapChange(0.5, "drift")
    assert steering.poll() is None
    assert steering.poll() == OverlapChange(0.25, "it pays")
    assert steering.poll() == OverlapChange(0.5, "it pays")


def test_auto_sees_every_round():
    control = Decides()
    steering = build_steering(control=control)

    steering.observe([], [[3, 4]])

    assert control.seen == [[[3, 4]]]
    assert steering.metrics() == {"overlap_auto/target": 1.0}
