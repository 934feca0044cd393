"""The ends of the checkpoint engine ``shm`` find each other from processes of their own, by Ray's job alone."""

import sys

import pytest
import ray

# Ray's workers cannot import a test module.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@ray.remote(num_cpus=0, max_concurrency=4)
class End:
    """A trainer's process, or, without a rank, that of the worker beside an engine."""

    def __init__(self, root, rank=None):
        from verl_ext.shm_weights import ShmCheckpointEngine

        self._engine = ShmCheckpointEngine(bucket_size=1, is_master=rank == 0, root=str(root), deadline_s=30.0)

    def prepare(self):
        return self._engine.prepare()

    async def send(self, version, values):
        import torch

        await self._engine.send_weights([("weight", torch.tensor(values))], global_steps=version)

    async def receive(self, version):
        return {name: tensor.tolist() async for name, tensor in self._engine.receive_weights(global_steps=version)}


@pytest.fixture
def ends(tmp_path):
    """Two trainers and three engines."""
    made = [End.remote(tmp_path, rank) for rank in (0, 1, None, None, None)]
    yield made
    for actor in made:
        ray.kill(actor)


def test_engines_wait_for_the_version_that_the_trainer_sends_and_its_successor_begins_anew(ends, tmp_path):
    trainers, engines = ends[:2], ends[2:]
    ready = ray.get([end.prepare.remote() for end in ends], timeout=120)
    assert len({end["node_id"] for end in ready}) == 1
    receiving = [engine.receive.remote(4) for engine in engines]
    assert not ray.wait(receiving, timeout=0.3)[0]
    ray.get([trainer.send.remote(4, [1.5, 2.5]) for trainer in trainers], timeout=30)
    assert ray.get(receiving, timeout=30) == [{"weight": [1.5, 2.5]}] * 3
    (folder,) = tmp_path.iterdir()
    assert [file.name for file in folder.iterdir()] == ["4"]
    ray.kill(trainers[0])
    ends.append(End.remote(tmp_path, 0))
    ray.get(ends[-1].prepare.remote(), timeout=60)
    assert not list(folder.iterdir()), "what a dead trainer left is gone"
