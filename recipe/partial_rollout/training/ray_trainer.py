"""The trainer: verl's ``RayPPOTrainer``, whose rollout is a round of partial rollout.

verl's ``fit`` runs unchanged, in both arms::

    SlotLoader -> N empty slots -> PartialRolloutAgentLoopManager.generate_sequences -> full batch
      -> log-probs, reward, advantage, update (verl) -> finish the round -> weight sync (RecipeCheckpointManager) -> resume

The round waits for N ready groups and for groups at ``max_staleness``; the update waits for the round; interrupted
samples wait in their workers for the next round. With ``partial_rollout.enable=False`` loader, manager and batches are
verl's own.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import need_critic
from verl.utils.ray_utils import auto_await

import recipe.partial_rollout.engine.replica as replica
from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints, claim_retention
from recipe.partial_rollout.config.settings import PartialRolloutConfig, engine_devices
from recipe.partial_rollout.engine.kept_kv import kv_gap
from recipe.partial_rollout.records.ledger import Ledger
from recipe.partial_rollout.records.run_trace import RunTrace
from recipe.partial_rollout.rollout.cluster_nodes import ClusterNodes
from recipe.partial_rollout.rollout.driver import Driver
from recipe.partial_rollout.rollout.engine_probe import EngineProbe
from recipe.partial_rollout.rollout.prompt_source import PromptSource, SlotLoader, rows_of
from recipe.partial_rollout.rollout.stop import StopSignals, StopTraining
from recipe.partial_rollout.training import loss
from recipe.partial_rollout.training.gpu_watch import GpuWatch
from recipe.partial_rollout.training.proximal import ProximalPolicy
from recipe.partial_rollout.training.rollout_parts import rollout_context
from recipe.partial_rollout.training.step_log import StepLog
from recipe.partial_rollout.training.training_steps import TrainingSteps, step_of
from recipe.partial_rollout.training.weight_sync import RecipeCheckpointManager
from verl_ext.standalone_engines import standalone_engines
from verl_ext.tracking_observer import observed_tracking

_PROBE_ROWS = 64


class PartialRolloutRayPPOTrainer(RayPPOTrainer):
    """``RayPPOTrainer`` whose batches come from rounds; reads ``config.partial_rollout``.

    Args:
        nodes: of Ray's cluster; told of each step that the run completes. None: those that live now.
        args, kwargs: verl's.
    """

    trace: RunTrace
    """opened in ``init_workers``, where verl makes its own parts"""
    gpus: GpuWatch
    """started there, too"""

    def __init__(self, config: Any, *args: Any, nodes: ClusterNodes | None = None, **kwargs: Any) -> None:
        self.nodes = nodes or ClusterNodes()
        self.settings = PartialRolloutConfig.from_config(config)
        self.proximal = ProximalPolicy.of(config, self.settings)
        self.prompt_source: PromptSource | None = None
        """None under noPR"""
        self.ledger: Ledger | None = None
        """None under noPR; opened in ``init_workers``"""
        replica.register()
        self.stop = StopSignals()
        self.run_dir = Path(config.trainer.default_local_dir)
        keep = claim_retention(config.trainer, critic=need_critic(config)) if self.settings.enable else None
        self.checkpoints = RunCheckpoints(self.run_dir, checksum_all=self.settings.checkpoint.checksum_all, keep=keep)
        self.resume_from = self._find_checkpoint(config)
        super().__init__(config, *args, **kwargs)
        self.step_log = StepLog(config, self.settings, self.run_dir, self.total_training_steps)
        self._phase_started: float | None = None
        self._measured: dict[str, float] = {}
        self._completed_step = step_of(self.resume_from)

    def _find_checkpoint(self, config: Any) -> Path | None:
        if not self.settings.enable:
            return None
        trainer = config.trainer
        return self.checkpoints.to_resume(trainer.resume_mode, trainer.get("resume_from_path"))

    @property
    def _rollout(self) -> Any:
        """The recipe's agent-loop manager."""
        return self.async_rollout_manager

    @property
    def _driver(self) -> Driver:
        """Of PR."""
        return self._rollout.driver

    def _create_dataloader(self, train_dataset: Any, val_dataset: Any, collate_fn: Any, train_sampler: Any) -> None:
        super()._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)
        self._collate: Any = self.train_dataloader.collate_fn  # type: ignore[union-attr]
        if not self.settings.enable:
            return
        steps, size = self.steps, self.settings.batch_groups
        self.prompt_source = PromptSource(self.train_dataloader, total=steps.offered * size)
        self.train_dataloader = SlotLoader(steps.per_epoch, size, exhausted=lambda: self._driver.exhausted)

    @property
    def steps(self) -> TrainingSteps:
        """Steps of the whole training, including those before a resumed checkpoint."""
        return TrainingSteps(
            per_epoch=len(self.train_dataloader),
            epochs=self.config.trainer.total_epochs,
            total=self.total_training_steps,
            drains=self.settings.drain,
            filters=self.settings.group_filter is not None,
        )

    def init_workers(self) -> None:
        """As verl's; then connect the recipe's parts to the replicas and workers that it made."""
        alone = engine_devices(self.config) > 0
        with standalone_engines(self.ray_worker_group_cls) if alone else nullcontext():
            super().init_workers()
        if self.settings.enable:
            self.send_loss()
        self.gpus = GpuWatch.of_cluster()
        context = rollout_context(self)
        self.settings, self.trace, self.ledger = context.settings, context.trace, context.ledger
        tokenizer: Any = self.tokenizer
        self._rollout.connect(context, tokenizer.pad_token_id)
        verls: Any = self.checkpoint_manager
        self.checkpoint_manager: Any = RecipeCheckpointManager(
            verls,
            self.settings.deadlines.weight_sync_s,
            driver=self._driver if self.settings.enable else None,
            note=partial(self.trace.phase, "sync"),
        )

    def send_loss(self) -> None:
        """Give the actor workers the loss that the config asks for; this also registers the recipe's losses there."""
        self.actor_rollout_wg.set_loss_fn(loss.worker_loss(self.config.actor_rollout_ref.actor, self.settings))

    def fit(self) -> None:
        """Probe the engines if asked to, then run verl's training loop, from the resumed checkpoint if any.

        Raises:
            StopTraining: after Ctrl-C or SIGTERM; if ``trainer.save_freq`` asks for checkpoints, one holds what was in
                flight.
        """
        with self.stop.caught():
            if step_of(self.resume_from) >= self.total_training_steps:
                print(f"nothing to do: {self.resume_from} is the checkpoint of the last step")
                return
            if self.settings.probe_s:
                self.checkpoint_manager.update_weights(0)
                self._probe("before training")
            try:
                table = self.step_log.open(resumes=self.resume_from is not None)
                with observed_tracking(self._observe_step, after=self._after_log, table=table):
                    if self.settings.enable:
                        self._driver.begin()
                    super().fit()
            except StopTraining:
                self._save_before_stop()
                raise
            exhausted = self.settings.group_filter is not None and self._driver.exhausted
            if exhausted:
                self._save_where_data_ended()
            if self.settings.enable:
                auto_await(self._driver.end)()
            if self.settings.probe_s:
                self._probe("after training")
        self.trace.complete()
        if self.ledger is not None:
            self.ledger.complete(exhausted=exhausted)

    def _probe(self, when: str) -> None:
        dataset: Any = self.train_dataset
        rows = [dataset[i] for i in range(min(_PROBE_ROWS, len(dataset)))]
        probe: EngineProbe = self._rollout.probe
        rate = auto_await(probe.measure)(rows_of(self._collate(rows)), self.settings.probe_s)
        print(f"engine kept full at {probe.concurrency} samples {when}: {rate:,.0f} tokens/s")

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        """Save verl's checkpoint; under partial rollout also everything in flight, and seal it."""
        if self.prompt_source is None or self.ledger is None:
            super()._save_checkpoint()
            return
        self.checkpoints.save(
            self.global_steps,
            save_manager=auto_await(self._driver.save),
            source=self.prompt_source.state_dict(),
            save_verl=super()._save_checkpoint,
            sizes=self.settings.sizes,
        )
        self.trace.checkpoint(self.global_steps)
        self.ledger.checkpoint(self.global_steps)

    def _load_checkpoint(self) -> int | None:
        if self.prompt_source is None or self.resume_from is None:
            return None if self.settings.enable else super()._load_checkpoint()
        trainer = self.config.trainer
        asked = trainer.resume_mode, trainer.get("resume_from_path")
        trainer.resume_mode, trainer.resume_from_path = "resume_path", str(self.resume_from)
        super()._load_checkpoint()
        trainer.resume_mode, trainer.resume_from_path = asked
        state = self.checkpoints.take(self.resume_from)
        self.prompt_source.load_state_dict(self.checkpoints.read_source(state))
        auto_await(self._driver.load)(state.manager, self.global_steps)
        slots: Any = self.train_dataloader
        slots.start_at(self.global_steps % self.steps.per_epoch)
        return None

    def _save_where_data_ended(self) -> None:
        """Save the last step if the data ended early (dynamic sampling); verl saves only the last step that it expects."""
        step, every = self._completed_step, self.config.trainer.save_freq
        print(
            f"the data ends after step {step} of {self.steps.last}: dynamic sampling has consumed it "
            f"(trainer.total_epochs={self.config.trainer.total_epochs})"
        )
        if every > 0 and step % every and step > step_of(self.resume_from):
            self.global_steps = step
            self._save_checkpoint()

    def _save_before_stop(self) -> None:
        """Save a checkpoint of the last completed step; the manager's state includes what was decoded since."""
        if self._completed_step and self.config.trainer.save_freq > 0:
            self.global_steps = self._completed_step
            self._save_checkpoint()
            print(f"saved {self.checkpoints.step_dir(self.global_steps)}; trainer.resume_mode=auto resumes from it")
        if self.ledger is not None:
            self.ledger.stopped(self._completed_step)

    # -- steps -----------------------------------------------------------------------------------------------------

    def _observe_step(self, data: dict[str, Any], step: int) -> dict[str, Any]:
        """Add the recipe's metrics to what verl logs for a step."""
        if "training/global_step" in data:
            self._complete_step()
        figures = {**self._rollout.take_step_metrics(), **self.gpus.take_metrics(), **self._measured}
        ours = {f"partial_rollout/{key}": value for key, value in figures.items()}
        self._measured = {}
        return self.step_log.extend({**self.proximal.metrics(data, step), **ours}, step)

    def _after_log(self, data: dict[str, Any], step: int) -> None:
        """Stop verl's ``fit`` if asked to, here and nowhere else: the step is logged, and the next has not begun."""
        self._end_phase()
        self.step_log.close(step, self.trace.last_round)
        if step < self.steps.last:
            self.stop.check()

    def _complete_step(self) -> None:
        """End the round of a trained batch, here and nowhere else; from now on a checkpoint is of this step.

        Called after the actor's update, in the critic's warm-up after the critic's: as late as verl's ``fit`` allows, so
        that the workers report while the trainer updates.
        """
        if self._completed_step == self.global_steps:
            return
        if self.settings.enable:
            auto_await(self._driver.finish_step)()
        self._completed_step = self.global_steps
        self.nodes.outlive()

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float | None]:
        if self.settings.enable and not self.proximal.recomputes(self.global_steps):
            return self.proximal.stand_in(batch), 0.0
        proximal, flops = super()._compute_old_log_prob(batch)
        if self.settings.enable:
            self._measured = kv_gap(batch.batch, proximal.batch["old_log_probs"], self.global_steps - 1)
        return proximal, flops

    def _update_critic(self, batch: DataProto) -> DataProto:
        output = super()._update_critic(batch)
        if self.config.trainer.critic_warmup > self.global_steps:
            # The actor is not updated, and the engines begin the next version.
            self._complete_step()
        return output

    def _update_actor(self, batch: DataProto) -> DataProto:
        if self.settings.enable:
            batch.meta_info[loss.TRAINED_VERSION] = self.global_steps - 1
            self.proximal.instruct(batch, self.global_steps)
        output = super()._update_actor(batch)
        self._complete_step()
        return output

    def _validate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As verl's, but abandoned if the user asks to stop: the step that it belongs to is logged, and is the last."""
        self._end_phase()
        if self.settings.enable:
            self._complete_step()
        try:
            self.stop.check()
            return super()._validate(*args, **kwargs)
        except StopTraining:
            return {"partial_rollout/validation_cut_short": 1.0}

    def _balance_batch(self, batch: DataProto, *args: Any, **kwargs: Any) -> None:
        self._phase_started = time.time()
        super()._balance_batch(batch, *args, **kwargs)

    def _end_phase(self) -> None:
        if self._phase_started is not None:
            self.trace.phase("train", self.global_steps, self._phase_started, time.time())
            self._phase_started = None
