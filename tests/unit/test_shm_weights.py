"""The checkpoint engine ``shm``: what the trainer's rank 0 writes is what every engine reads, and nothing stays behind."""

import asyncio

import pytest
import torch
from verl.checkpoint_engine import CheckpointEngineRegistry

from verl_ext import shm_weights

TENSORS = {
    "odd": torch.arange(7, dtype=torch.bfloat16),
    "transposed": torch.randn(4, 6).t(),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "flags": torch.tensor([True, False, True]),
    "small": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
}


def same(got, wanted):
    assert list(got) == list(wanted)
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        assert torch.equal(got[name].double(), tensor.double()), name


def test_file_is_replaced_only_when_it_is_whole(tmp_path):
    def tensors():
        yield "first", torch.zeros(1000)
        same(dict(shm_weights.read_file(tmp_path / "1")), {"old": torch.ones(2)})
        raise OSError(28, "No space left on device")

    shm_weights.write_file(tmp_path / "1", [("old", torch.ones(2))])
    with pytest.raises(OSError, match="No space left on device"):
        shm_weights.write_file(tmp_path / "1", tensors())
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_mapped_tensor_outlives_its_file_and_is_the_readers_own(tmp_path):
    shm_weights.write_file(tmp_path / "1", [("a", torch.ones(3))])
    ((_, mine),), ((_, other),) = shm_weights.read_file(tmp_path / "1"), shm_weights.read_file(tmp_path / "1")
    (tmp_path / "1").unlink()
    mine += 1
    assert mine.tolist() == [2, 2, 2] and other.tolist() == [1, 1, 1]


def test_receivers_wait_for_the_master_and_every_trainer_iterates(tmp_path, monkeypatch):
    """Processes of their own find each other in tests/e2e/test_separate.py."""
    monkeypatch.setattr(shm_weights, "job_key", lambda: "job")
    make = CheckpointEngineRegistry.get("shm")
    trainers = [make(bucket_size=1, is_master=rank == 0, root=str(tmp_path)) for rank in range(2)]
    receivers = [make(bucket_size=1, root=str(tmp_path)) for _ in range(2)]
    gathered = [iter(TENSORS.items()) for _ in trainers]

    async def everything(weights):
        return {name: tensor.clone() async for name, tensor in weights}

    async def sync():
        receiving = [asyncio.ensure_future(everything(each.receive_weights(global_steps=3))) for each in receivers]
        await asyncio.sleep(0.02)
        assert not any(each.done() for each in receiving)
        for trainer, weights in zip(trainers, gathered, strict=True):
            await trainer.send_weights(weights, global_steps=3)
        return [*await asyncio.gather(*receiving), await everything(receivers[0].get_weights())]

    for received in asyncio.run(sync()):
        same(received, TENSORS)
    assert [next(weights, None) for weights in gathered] == [None, None]
    for engine in (*trainers, *receivers):
        engine.finalize()
    assert not list(tmp_path.iterdir())
