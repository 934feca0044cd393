"""What the recipe asks of the engine that verl starts."""

from argparse import Namespace
from dataclasses import fields

from recipe.partial_rollout import replica
from recipe.partial_rollout.replica import leave_headroom


def test_headroom_is_vllms_watermark_unless_the_user_has_set_it():
    ours, users = Namespace(watermark=0.0), Namespace(watermark=0.2)
    for args in (ours, users):
        leave_headroom(args, 0.05)
    assert ours.watermark == 0.05 and users.watermark == 0.2


def test_engine_without_a_watermark_goes_without_and_says_so(monkeypatch):
    said = []
    monkeypatch.setattr(replica.logger, "warning", lambda text, *values: said.append(text % values))
    args = Namespace()
    leave_headroom(args, 0.0)
    assert not said
    leave_headroom(args, 0.05)
    assert vars(args) == {}
    assert said == ["partial_rollout.kv_headroom=0.05 has no effect: this vLLM has no watermark option"]


def test_installed_vllm_has_the_option():
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert {field.name: field.default for field in fields(AsyncEngineArgs)}["watermark"] == 0.0
