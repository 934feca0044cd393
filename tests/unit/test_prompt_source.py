"""Prompts come in the order of verl's own dataloader, each once an epoch, also across a restart; so do noPR's rows."""

from itertools import islice
from unittest.mock import MagicMock, Mock

import pytest
import torch
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_sampler
from verl.utils.dataset.rl_dataset import collate_fn

from recipe.partial_rollout.checkpoint.manifest import read_snapshot, write_snapshot
from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints
from recipe.partial_rollout.rollout.prompt_source import PromptSource, TrainingSteps
from recipe.partial_rollout.rollout.run_files import RunFiles
from recipe.partial_rollout.training.trainer_run import PartialRolloutRayPPOTrainer, SlotLoader
from tests.unit.test_stop_in_fit import Weights

ROWS = [
    {
        "dummy_tensor": torch.tensor([0]),
        "raw_prompt": [{"role": "user", "content": f"question {index}"}],
        "index": index,
        "extra_info": {"index": index, "split": "train"},
    }
    for index in range(10)
]
"""as verl's ``RLHFDataset`` makes them"""


def loader(workers=0):
    config = OmegaConf.create({"shuffle": True, "seed": 3, "sampler": None})
    sampler = create_rl_sampler(config, ROWS)
    return StatefulDataLoader(ROWS, 4, num_workers=workers, drop_last=True, collate_fn=collate_fn, sampler=sampler)


def names(prompts):
    return [(prompt.uid, prompt.row["index"]) for prompt in prompts]


@pytest.mark.parametrize(("before", "workers"), [*((taken, 0) for taken in (0, 3, 4, 8, 9, 16, 21)), (7, 2)])
def test_source_that_is_restored_gives_what_one_that_never_stopped_gives(before, workers, tmp_path):
    whole = names(PromptSource(loader(workers=workers), total=24).take(24))
    stopped = PromptSource(loader(workers=workers), total=24)
    assert names(stopped.take(before)) == whole[:before]
    write_snapshot(tmp_path / "source", stopped.state_dict())
    restored = PromptSource(loader(workers=workers), total=24)
    restored.load_state_dict(read_snapshot(tmp_path / "source"))
    assert names(restored.take(30)) == whole[before:]
    assert restored.left == 0 and restored.take(1) == []


def test_source_resumed_with_fewer_prompts_than_were_taken_gives_none():
    ahead = PromptSource(loader(), total=16)
    ahead.take(12)
    behind = PromptSource(loader(), total=8)
    behind.load_state_dict(ahead.state_dict())
    assert behind.take(4) == [] and behind.left == 0
    state = behind.state_dict()
    assert (state["epoch"], state["position"]) == (1, 4)


@pytest.mark.parametrize("first", [True, False])
def test_batch_whose_rows_differ_in_their_keys_is_refused_before_a_prompt_is_made(first):
    """Rows of a user's own dataset class; verl's noPR refuses them by an assertion."""
    hints = [{"hint": f"hint of {i}"} if i % 2 == 0 else {} for i in range(8)]
    mixed = [{**hint, **row} if first else {**row, **hint} for hint, row in zip(hints, ROWS, strict=False)]
    source = PromptSource(StatefulDataLoader(mixed, 4, num_workers=0, drop_last=True, collate_fn=collate_fn), total=8)
    with pytest.raises(RuntimeError, match=r"^rows of data.train_files .* a batch of 4 has hint 2 times$"):
        source.take(1)
    assert source.state_dict()["rows"] == []


@pytest.mark.timeout(20)
def test_loader_that_gives_nothing_ends_the_run_instead_of_a_loop():
    """It promises two batches and gives none, as a sampler of the user's own may."""
    empty = MagicMock(batch_size=4, **{"__len__.return_value": 2})
    with pytest.raises(ValueError, match="gives no batch"):
        PromptSource(empty, total=8).take(1)


def test_slots_of_a_resumed_epoch_are_those_that_are_left():
    trained = []
    for epoch in range(3):
        for slots in SlotLoader(5, 4, lambda: 13 + len(trained), lambda: len(trained) == 6):
            assert len(slots["slot"]) == 4
            trained.append(epoch)
    assert trained == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("step", [2, 4, 7, 8], ids=["mid", "end of an epoch", "mid of the second", "end of the second"])
def test_resumed_baseline_sees_the_rows_in_the_same_order(tmp_path, composed_config, workers, step):
    config = composed_config("quickstart_cpu", f"trainer.default_local_dir={tmp_path}", "trainer.resume_mode=auto")

    def process():
        ours = object.__new__(PartialRolloutRayPPOTrainer)
        ours.config, ours.use_critic, ours.actor_rollout_wg = config, False, Weights(lambda name: None)
        ours.files, ours.recorder, ours.driver = RunFiles(RunCheckpoints(tmp_path)), Mock(), None
        ours.files.begin()
        rows = list(range(8))
        sampler = create_rl_sampler(OmegaConf.create({"shuffle": True, "seed": 1}), rows)
        loader = StatefulDataLoader(rows, batch_size=2, num_workers=workers, drop_last=True, sampler=sampler)
        ours.steps = TrainingSteps(4, 3, 12)
        ours.train_dataloader, ours.global_steps = loader, 0
        ours._load_checkpoint()
        return ours

    def batches(ours):
        """As in verl's ``fit``."""
        for _ in range(ours.global_steps // 4, 3):
            for batch in ours.train_dataloader:
                ours.global_steps = ours.files.completed_step = ours.global_steps + 1
                yield batch.tolist()

    whole = list(batches(process()))
    first = process()
    begun = list(islice(batches(first), step))
    first._save_checkpoint()
    again = process()
    assert again.global_steps == step and begun + list(batches(again)) == whole
