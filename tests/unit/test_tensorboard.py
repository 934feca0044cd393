"""verl's other trackers get what SwanLab gets: shown with TensorBoard, which needs no account."""

import pytest

from recipe.partial_rollout.records.figures import FIGURES, SECTION, overview
from verl_ext.tracking_observer import observed_tracking

STEP = {
    "training/global_step": 1,
    "timing_s/step": 9.0,
    "timing_s/gen": 4.0,
    "val-core/gsm8k/acc/mean@1": 0.5,
    "partial_rollout/rollout/efficiency": 0.8,
    "partial_rollout/rollout/bubble_fraction": 0.2,
    "partial_rollout/rollout/tokens_per_s": 100.0,
}


def test_tensorboard_has_the_ten_figures(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="TENSORBOARD IS NOT INSTALLED: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    with observed_tracking(lambda data, step: overview(data, partial=False) | data, table={"arm": "noPR"}):
        from verl.utils.tracking import Tracking

        tracking = Tracking("project", "noPR", ["tensorboard"], {"trainer": {}})
        tracking.log(STEP, 1)
        tracking.finish()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    shown = events.Tags()["scalars"]
    assert {f"{SECTION}/{figure}" for figure in FIGURES} <= set(shown)
    assert min(shown).startswith(SECTION), "the section that sorts first"
    assert events.Scalars(f"{SECTION}/step_s")[0].value == 9.0
