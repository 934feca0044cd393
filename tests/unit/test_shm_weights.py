"""The checkpoint engine ``shm``: what the trainer's rank 0 writes is what every engine reads, and nothing stays behind."""

import asyncio

import pytest
import torch
from verl.checkpoint_engine import CheckpointEngineRegistry

from verl_ext import shm_weights

TENSORS = {
    "odd": torch.arange(7, dtype=torch.bfloat16),
    "matrix": torch.randn(3, 5),
    "transposed": torch.randn(4, 6).t(),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "counts": torch.tensor([1, 2, 3], dtype=torch.int64),
    "flags": torch.tensor([True, False, True]),
    "small": torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
}


@pytest.fixture
def ends(tmp_path, monkeypatch):
    """The engines of two trainers (the first is the master) and of two receivers of a job."""

    monkeypatch.setattr(shm_weights, "job_key", lambda: "job")
    make = CheckpointEngineRegistry.get("shm")
    trainers = [make(bucket_size=1, is_master=rank == 0, root=str(tmp_path)) for rank in range(2)]
    return trainers, [make(bucket_size=1, root=str(tmp_path)) for _ in range(2)]


async def everything(weights):
    return {name: tensor.clone() async for name, tensor in weights}


def same(got, wanted):
    assert list(got) == list(wanted)
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        assert torch.equal(got[name].double(), tensor.double()), name


def test_file_is_replaced_only_when_it_is_whole_and_a_write_that_fails_leaves_nothing_and_names_the_key(ends, tmp_path):
    (master, _), _ = ends
    folder = tmp_path / "verl-weights-job"

    def tensors():
        yield "first", torch.zeros(1000)
        same(dict(shm_weights.read_file(folder / "1")), {"old": torch.ones(2)})
        raise OSError(28, "No space left on device")

    asyncio.run(master.send_weights([("old", torch.ones(2))], global_steps=1))
    with pytest.raises(OSError, match=rf"No space left on device: {tmp_path} must hold the whole model \(.*shm\.root"):
        asyncio.run(master.send_weights(tensors(), global_steps=1))
    assert [path.name for path in folder.iterdir()] == ["1"]
    same(dict(shm_weights.read_file(folder / "1")), {"old": torch.ones(2)})


def test_mapped_tensor_outlives_its_file_and_is_the_readers_own(tmp_path):
    shm_weights.write_file(tmp_path / "1", [("a", torch.ones(3))])
    ((_, mine),), ((_, other),) = shm_weights.read_file(tmp_path / "1"), shm_weights.read_file(tmp_path / "1")
    (tmp_path / "1").unlink()
    mine += 1
    assert mine.tolist() == [2, 2, 2] and other.tolist() == [1, 1, 1]


def test_receivers_wait_for_what_the_master_sends_and_every_trainer_iterates(ends, tmp_path):
    """Processes of their own find each other in tests/e2e/test_separate.py."""
    trainers, receivers = ends
    gathered = [iter(TENSORS.items()) for _ in trainers]

    async def sync():
        receiving = [asyncio.ensure_future(everything(each.receive_weights(global_steps=3))) for each in receivers]
        await asyncio.sleep(0.02)
        assert not any(each.done() for each in receiving)
        for trainer, weights in zip(trainers, gathered, strict=True):
            await trainer.send_weights(weights, global_steps=3)
        return await asyncio.gather(*receiving)

    for received in asyncio.run(sync()):
        same(received, TENSORS)
    assert [next(weights, None) for weights in gathered] == [None, None]
    same(asyncio.run(everything(receivers[0].get_weights())), TENSORS)
    for engine in (*trainers, *receivers):
        engine.finalize()
    assert not list(tmp_path.iterdir())
