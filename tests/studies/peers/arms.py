"""The arms of ``tests.studies peers``: noPR, verl's own trainers, and PR with each way to schedule."""

from __future__ import annotations

from pathlib import Path

from recipe.partial_rollout.config.settings import CONF_DIR
from tests.studies.arm import BASELINE, Arm

_V1 = ("recipe.partial_rollout.tools.verl_trainer", "--config-dir", str(CONF_DIR))
_ASYNC = (
    "trainer.use_v1=True",
    "trainer.v1.trainer_mode=colocate_async",
    "trainer.resume_mode=disable",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
)
_SAMPLER = "trainer.v1.sampler.custom_sampler"
_QUICK = (*_ASYNC, f"{_SAMPLER}.path={Path(__file__).with_name('sampler.py')}", f"{_SAMPLER}.name=QuickReplayBuffer")
_SEPARATE = ("partial_rollout.placement=separate",)
"""a device for the trainer, one for the engine (``conf/platform/cpu.yaml``, for verl too); processes share the cores"""
_V1_SEPARATE = (
    *_SEPARATE,
    "trainer.v1.trainer_mode=separate_async",
    # No engine on the trainer's device, and new weights after every batch, as in all other arms.
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.v1.separate_async.parameter_sync_step=1",
    # At INFO verl 0.9.1 stops here: its message that there is no such engine passes logging an argument of print.
    "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_LOGGING_LEVEL=WARN",
)
_NO_DRAIN = "partial_rollout.drain=False"
"""at the end verl leaves its spare batch in flight, and so does the recipe"""
_OURS = (_NO_DRAIN, "partial_rollout.overlap=0.75")
"""verl has a spare batch in flight; 3/4 of one, because staleness is overlap"""
_BOUNDED = (*_OURS, "partial_rollout.scheduling.policy=bounded")
_PR_SEPARATE = (*_SEPARATE, _NO_DRAIN, "partial_rollout.scheduling.policy=bounded")
_SPLIT = ("actor_rollout_ref.actor.ppo_mini_batch_size=4",)
"""two updates a batch, so that the log-probs before the first need a forward pass"""
_SCARCE = ("actor_rollout_ref.rollout.max_num_seqs=64",)
"""seats of the engine: a quarter of the 256 samples, four batches, that the scarce arms keep in flight. With two batches a
quarter is enough: by the time a batch is complete, nothing is queued any more"""
_V1_FOUR_BATCHES = ("trainer.v1.colocate_async.num_warmup_batches=3",)
_FOUR_BATCHES = ("partial_rollout.overlap=3",)
_QUEUED = ("partial_rollout.slots_per_replica=256",)
"""samples beyond the seats wait in the engine's queue, as they do under verl's trainer; by default they wait outside"""
_SSIM = (_NO_DRAIN, "partial_rollout.mode=ssim", "partial_rollout.scheduling.policy=seed")
"""the published supplementation: its priority key, and a batch of samples in flight, refilled as they finish"""
_APRIL = (
    _NO_DRAIN,
    "partial_rollout.mode=april",
    "partial_rollout.overlap=1",
    "partial_rollout.scheduling.policy=bounded",
)
"""APRIL: twice the batch unfinished when a round starts, carried groups first"""

TASK = (
    "trainer.logger=[file]",
    "actor_rollout_ref.actor.optim.lr=1e-4",
    "actor_rollout_ref.rollout.val_kwargs.n=4",
    "trainer.val_before_train=True",
    "trainer.test_freq=6",
)
"""a learning rate that every arm tolerates; a validation at the start, in which every engine compiles, and one after
every sixth step, of the weights that the arm has then"""

ARMS = (
    BASELINE,
    Arm("v1_sync", "verl v1 sync", (*_ASYNC, "trainer.v1.trainer_mode=sync"), _V1),
    Arm("v1_colocate_async", "verl v1 colocate_async", _ASYNC, _V1),
    Arm("v1_colocate_async_quick", "verl v1 colocate_async, 0.1 s polls", _QUICK, _V1),
    Arm("v1_separate_async", "verl v1 separate_async", (*_ASYNC, *_V1_SEPARATE), _V1),
    Arm("v1_separate_async_quick", "verl v1 separate_async, 0.1 s polls", (*_QUICK, *_V1_SEPARATE), _V1),
    Arm(
        "v1_separate_async_quick_2",
        "verl v1 separate_async, 0.1 s polls, 2 spare batches",
        (*_QUICK, *_V1_SEPARATE, "trainer.v1.separate_async.num_warmup_batches=2"),
        _V1,
    ),
    Arm("PR_quickstart", "PR as in the quick start", (_NO_DRAIN,)),
    Arm("PR_slots_held", "PR, slots kept through tools", (_NO_DRAIN, "partial_rollout.tools.release_after_s=inf")),
    Arm("PR_bounded", "PR, bounded", _BOUNDED),
    Arm("PR_more", "PR, bounded, overlap 1.5", (*_BOUNDED, "partial_rollout.overlap=1.5")),
    Arm("PR_split", "PR, overlap 1.5, two updates", (*_BOUNDED, "partial_rollout.overlap=1.5", *_SPLIT)),
    Arm("PR_separate_1", "PR, separate, overlap 1", (*_PR_SEPARATE, "partial_rollout.overlap=1")),
    Arm("PR_separate_1.5", "PR, separate, overlap 1.5", (*_PR_SEPARATE, "partial_rollout.overlap=1.5")),
    Arm(
        "PR_separate_1.5_split",
        "PR, separate, overlap 1.5, two updates",
        (*_PR_SEPARATE, "partial_rollout.overlap=1.5", *_SPLIT),
    ),
    Arm("PR_separate_2", "PR, separate, overlap 2", (*_PR_SEPARATE, "partial_rollout.overlap=2")),
    Arm("PR_recompute", "PR, bounded, KV recomputed", (*_BOUNDED, "partial_rollout.resume_kv=recompute")),
    Arm("PR_seed", "PR, seed", (*_OURS, "partial_rollout.scheduling.policy=seed")),
    Arm("PR_overtake_0", "PR, overtake 0", (*_OURS, "partial_rollout.scheduling.overtake=0")),
    Arm("PR_ssim", "PR, mode ssim", _SSIM),
    Arm("PR_april", "PR, mode april", _APRIL),
    Arm(
        "v1_colocate_async_scarce",
        "verl v1 colocate_async, 0.1 s polls, 4 batches on 64 seats",
        (*_QUICK, *_SCARCE, *_V1_FOUR_BATCHES),
        _V1,
    ),
    Arm("PR_scarce", "PR, bounded, 4 batches on 64 seats", (*_OURS, *_SCARCE, *_FOUR_BATCHES)),
    Arm(
        "PR_scarce_queued",
        "PR, bounded, 4 batches on 64 seats, queued in the engine",
        (*_OURS, *_SCARCE, *_FOUR_BATCHES, *_QUEUED),
    ),
)
SEPARATE = frozenset(arm.name for arm in ARMS if set(_SEPARATE) <= set(arm.overrides))
"""names of those whose engines decode while the trainer updates"""
CAPTIONS = {arm.name: arm.caption for arm in ARMS}
