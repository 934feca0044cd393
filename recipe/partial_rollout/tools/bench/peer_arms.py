"""The arms of ``bench peers``: what each is run with."""

from __future__ import annotations

from pathlib import Path

from recipe.partial_rollout.main_ppo import CONF_DIR
from recipe.partial_rollout.tools.study import BASELINE, Arm

_V1 = ("verl.trainer.main_ppo", "--config-dir", str(CONF_DIR))
_ASYNC = (
    "trainer.use_v1=True",
    "trainer.v1.trainer_mode=colocate_async",
    "trainer.resume_mode=disable",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
)
_OURS = ("partial_rollout.drain=False", "partial_rollout.overlap=0.75")
"""at the end verl leaves its spare batch in flight, and so does the recipe; 3/4 of one, because staleness is overlap"""
TASK = (
    "actor_rollout_ref.actor.optim.lr=1e-4",
    "actor_rollout_ref.rollout.val_kwargs.n=4",
    "trainer.val_before_train=True",
    "trainer.test_freq=1000000",
)
"""a learning rate that every arm's staleness bears; a validation at the start, in which every engine compiles, and one at
the end, of the weights that the arm has"""
_SAMPLER = "trainer.v1.sampler.custom_sampler"
_QUICK = (
    *_ASYNC,
    f"{_SAMPLER}.path={Path(__file__).with_name('peer_sampler.py')}",
    f"{_SAMPLER}.name=QuickReplayBuffer",
)
_SCARCE = ("actor_rollout_ref.rollout.max_num_seqs=64",)
"""seats of the engine: a quarter of the 256 samples, four batches, that the scarce arms keep in flight. With two batches a
quarter is enough: by the time a batch is complete, nothing is queued any more"""
_V1_FOUR_BATCHES = ("trainer.v1.colocate_async.num_warmup_batches=3",)
_FOUR_BATCHES = ("partial_rollout.overlap=3",)
_QUEUED = ("partial_rollout.slots_per_replica=256",)
"""samples beyond the seats wait in the engine's queue, as they do under verl's trainer; by default they wait outside"""

ARMS = (
    Arm(BASELINE, ("partial_rollout.enable=False",)),
    Arm("v1_sync", (*_ASYNC, "trainer.v1.trainer_mode=sync"), _V1),
    Arm("v1_colocate_async", _ASYNC, _V1),
    Arm("v1_colocate_async_quick", _QUICK, _V1),
    Arm("PR_bounded", (*_OURS, "partial_rollout.scheduling.policy=bounded")),
    Arm("PR_more", (*_OURS, "partial_rollout.scheduling.policy=bounded", "partial_rollout.overlap=1.5")),
    Arm("PR_auto", (*_OURS, "partial_rollout.scheduling.policy=bounded", "partial_rollout.overlap=auto")),
    Arm("PR_recompute", (*_OURS, "partial_rollout.scheduling.policy=bounded", "partial_rollout.resume_kv=recompute")),
    Arm("PR_seed", (*_OURS, "partial_rollout.scheduling.policy=seed")),
    Arm("PR_in_order", (*_OURS, "partial_rollout.scheduling.policy=in_order")),
    Arm("v1_colocate_async_scarce", (*_QUICK, *_SCARCE, *_V1_FOUR_BATCHES), _V1),
    Arm("PR_scarce", (*_OURS, *_SCARCE, *_FOUR_BATCHES)),
    Arm("PR_scarce_queued", (*_OURS, *_SCARCE, *_FOUR_BATCHES, *_QUEUED)),
)
LABELS = {
    "v1_sync": "verl v1 sync",
    "v1_colocate_async": "verl v1 colocate_async",
    "v1_colocate_async_quick": "verl v1 colocate_async, 0.1 s polls",
    "PR_bounded": "PR, bounded",
    "PR_more": "PR, bounded, overlap 1.5",
    "PR_auto": "PR, bounded, overlap auto",
    "PR_recompute": "PR, bounded, KV recomputed",
    "PR_seed": "PR, seed",
    "PR_in_order": "PR, in_order",
    "v1_colocate_async_scarce": "verl v1 colocate_async, 0.1 s polls, 4 batches on 64 seats",
    "PR_scarce": "PR, bounded, 4 batches on 64 seats",
    "PR_scarce_queued": "PR, bounded, 4 batches on 64 seats, queued in the engine",
}
"""for tables and pictures; an arm without one goes by its name"""
