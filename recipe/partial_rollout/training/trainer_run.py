"""What the recipe's trainers of verl share, a run around verl's training loop; and verl's ``RayPPOTrainer`` with it.

A trainer is one of verl's classes with ``TrainerRun`` before it. verl's gives the parts and the loop; ``TrainerRun`` gives
the run's session, checkpoints, stops and metrics. verl's ``fit`` runs unchanged, in both arms::

    SlotLoader -> N empty slots -> PartialRolloutAgentLoopManager.generate_sequences (Driver.next_batch) -> full batch
      -> log-probs, reward, advantage, update (verl) -> weight sync (RecipeCheckpointManager), which ends the step

With ``partial_rollout.enable=False`` loader, manager and batches are verl's own. ``training/v1`` has verl's v1 trainer.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import need_critic

import recipe.partial_rollout.engine.replica as replica
from recipe.partial_rollout.checkpoint.run_checkpoints import claim_retention
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.records.run_log import Ended, Phase
from recipe.partial_rollout.rollout.prompt_source import SlotLoader
from recipe.partial_rollout.rollout.replicas import ServerControl
from recipe.partial_rollout.rollout.session import RunSession, TrainingSteps
from recipe.partial_rollout.rollout.slots import ReplicaSlots
from recipe.partial_rollout.rollout.stop import StopTraining
from recipe.partial_rollout.training import loss
from recipe.partial_rollout.training.reward_info import averaged, colocated_scores, per_sample
from recipe.partial_rollout.training.step_log import StepLog, last_lines
from recipe.partial_rollout.training.trackers import open_run
from recipe.partial_rollout.training.weight_transfer import RecipeCheckpointManager
from recipe.partial_rollout.waits import ERROR_LOG, finished
from verl_ext.standalone_engines import standalone_engines
from verl_ext.tracking_observer import observed_tracking

_VerlsTrainer: Any = object
"""stands for the class of verl's that follows ``TrainerRun``"""


class TrainerRun(_VerlsTrainer):
    """The run's part of a trainer; reads ``config.partial_rollout``.

    Args:
        session: the run, which has begun.
        args, kwargs: verl's.
    """

    checkpoint_manager: Any

    def __init__(self, config: Any, *args: Any, session: RunSession, **kwargs: Any) -> None:
        self.session = session
        self.proximal = loss.ProximalPolicy.of(config, self.settings)
        self._noted = 0
        """the last step whose training is in the log"""
        replica.register()
        claim_retention(config.trainer, critic=need_critic(config))
        super().__init__(config, *args, **kwargs)

    @property
    def settings(self) -> PartialRolloutConfig:
        return self.session.settings

    def _offer(self, loader: Any) -> None:
        """Make ``loader``, verl's, the data of the run."""
        epochs, asked = self.config.trainer.total_epochs, self.total_training_steps
        # verl validates and saves in the step that it expects to be the last.
        self.total_training_steps = min(asked, len(loader) * epochs)
        if self.total_training_steps < asked:
            print(
                f"the data ends after step {self.total_training_steps} of trainer.total_training_steps={asked} "
                f"(trainer.total_epochs={epochs})"
            )
        steps = TrainingSteps(len(loader), epochs, self.total_training_steps)
        self.step_log = StepLog(self.config, self.settings, self.total_training_steps)
        self.session.offer(loader, steps)
        if self.settings.enable:
            self.train_dataloader = SlotLoader(self.session)

    def _connect(self, rollout: Any) -> None:
        """Connect the recipe's parts to the replicas and workers that verl has made; ``rollout`` is the arm's manager."""
        settings = self.settings
        if settings.enable:
            self.send_loss()
        control = ServerControl(
            self.llm_server_manager.get_replicas(),
            settings.deadlines.interrupt_s,
            restarts=settings.failures.replica_restarts,
        )
        lengths = self.config.actor_rollout_ref.rollout
        slots = ReplicaSlots(
            settings.slots_per_replica,
            given=settings.slots_given,
            kv_tokens=finished(control.kv_tokens()),
            prompt=lengths.prompt_length,
            response=lengths.response_length,
        )
        print(slots.describe())
        strategy = self.config.actor_rollout_ref.actor.strategy
        if self.config.trainer.use_v1:
            strategy += " under v1"
        name = self.config.trainer.experiment_name
        self.session.open(control, slots, self.actor_rollout_wg.workers, name, strategy)
        rollout.connect(self.session, self.tokenizer.pad_token_id)
        rollout.on_batch = partial(self.step_log.show, tokenizer=self.tokenizer)
        self.checkpoint_manager = RecipeCheckpointManager(self.checkpoint_manager, self.session)

    def send_loss(self) -> None:
        """Give the actor workers the loss that the config asks for; this also registers the recipe's losses there."""
        actor = self.config.actor_rollout_ref.actor
        self.actor_rollout_wg.set_loss_fn(loss.worker_loss(actor, self.settings, self.proximal))

    def play(self, loop: Callable[[], object]) -> None:
        """Run verl's training ``loop``, from the resumed checkpoint if any.

        Raises:
            StopTraining: after Ctrl-C or SIGTERM; if ``trainer.save_freq`` asks for checkpoints, one holds what was in
                flight.
        """
        session = self.session
        if not session.trains:
            self._only_validate(loop)
            return
        with session.stop.caught():
            (session.run_dir / ERROR_LOG).unlink(missing_ok=True)
            if session.checkpoints.resumed_step >= self.total_training_steps:
                print(f"nothing to do: {session.checkpoints.chosen} is the checkpoint of the last step")
                session.complete()
                return
            try:
                table = open_run(self.config, session.checkpoints.run)
                with observed_tracking(self._observe_step, self._after_log, table, session.metrics):
                    # 860,000 objects that imports made stay: full collections walk them no more (1.9 s each on two cores).
                    gc.freeze()
                    loop()
            except StopTraining:
                self._save_before_stop()
                raise
            except Exception as error:
                session.explain(error)
                raise
            if session.exhausted:
                self._save_where_data_ended()
            session.end()
        session.complete()
        print(last_lines(self.config, session.completed_step))

    def _only_validate(self, loop: Callable[[], object]) -> None:
        """Validate the weights once: verl's ``fit`` returns after its first validation, if it makes one."""
        self.config.trainer.val_before_train = True
        table, file = open_run(self.config, None), self.session.metrics.with_name("validation.jsonl")
        with self.session.stop.caught(), observed_tracking(self._observe_step, table=table, file=file):
            loop()
            # A validation that is cut short ends as if it were whole.
            self.session.stop.check()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        """Save verl's checkpoint; under partial rollout also everything in flight, and seal it."""
        # It comes before the step's weight sync, which ends a step that saves nothing.
        self.session.complete_step(self.global_steps)
        self.session.save(super()._save_checkpoint)

    def _load_checkpoint(self) -> None:
        """Load the trainer's part of the checkpoint to resume, if there is one."""
        self.global_steps = 0
        trainer, chosen = self.config.trainer, self.session.checkpoints.chosen
        if chosen is None:
            return
        asked = trainer.resume_mode, trainer.get("resume_from_path")
        trainer.resume_mode, trainer.resume_from_path = "resume_path", str(chosen)
        super()._load_checkpoint()
        trainer.resume_mode, trainer.resume_from_path = asked

    def _load_data(self) -> None:
        """Go on in the data where the checkpoint to resume, if any, left it; PR: with everything in flight."""
        session, loader = self.session, self.train_dataloader
        chosen = session.checkpoints.chosen
        if chosen is None or not session.trains:
            return
        if self.settings.enable:
            session.load()
        elif self.global_steps % session.steps.per_epoch == 0:
            # verl starts the sampler over at the end of an epoch, so the next one would repeat the order of the first.
            loader.load_state_dict(torch.load(chosen / "data.pt", weights_only=False))
            deque(loader, maxlen=0)

    def _save_where_data_ended(self) -> None:
        """Save the last step if the data ended early (dynamic sampling); verl saves only the last step that it expects."""
        step, every = self.session.completed_step, self.config.trainer.save_freq
        print(self.step_log.data_ended(step))
        if every > 0 and step % every and step > self.session.checkpoints.resumed_step:
            self.global_steps = step
            self._save_checkpoint()

    def _save_before_stop(self) -> None:
        """Save a checkpoint of the last completed step; the manager's state includes what was decoded since."""
        session = self.session
        if session.completed_step and self.config.trainer.save_freq > 0:
            self.global_steps = session.completed_step
            self._save_checkpoint()
            saved = session.checkpoints.step_dir(session.completed_step)
            print(f"saved {saved}; trainer.resume_mode=auto resumes from it")
        session.log.add(Ended(session.completed_step, complete=False), sync=True)

    # -- steps -----------------------------------------------------------------------------------------------------

    def _choose_pass(self) -> None:
        """Have verl leave out its pass over the batch of this step where the update gives the proximal log-probs."""
        if self.proximal.from_update:
            correction = self.config.algorithm.rollout_correction
            correction.bypass_mode = not self.proximal.recomputes(self.global_steps)

    def _compute_reward_colocate(self, batch: DataProto) -> DataProto:
        return colocated_scores(self.reward_loop_manager, batch, self.settings.deadlines.reward_s)

    def _observe_step(self, data: dict[str, Any], step: int) -> dict[str, Any]:
        """Add the recipe's metrics to what verl logs for a step."""
        ours = {f"partial_rollout/{key}": value for key, value in self.session.figures.items()}
        self.session.figures.clear()
        return self.step_log.extend({**loss.logged(data), **ours}, step)

    def _after_log(self, data: dict[str, Any], step: int) -> None:
        """Stop verl's ``fit`` if asked to, here and nowhere else: the step is logged, and the next has not begun."""
        self._note_training()
        self.step_log.close(step, self.session.log.last_round)
        if step < self.session.steps.last:
            self.session.stop.check()

    def _validate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As verl's, but abandoned if the user asks to stop: the step that it belongs to is logged, and is the last."""
        self._note_training()
        try:
            self.session.stop.check()
            return super()._validate(*args, **kwargs)
        except StopTraining:
            return {"partial_rollout/validation_cut_short": 1.0}

    def _val_metrics_update(
        self,
        data_sources: Any,
        sample_uids: Any,
        reward_extra_infos_dict: dict[str, list[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        infos = averaged(per_sample(reward_extra_infos_dict), data_sources)
        return super()._val_metrics_update(data_sources, sample_uids, infos, *args, **kwargs)

    def _dump_generations(
        self, inputs: Any, outputs: Any, gts: Any, scores: Any, reward_extra_infos_dict: dict[str, Any], dump_path: str
    ) -> None:
        infos = per_sample(reward_extra_infos_dict)
        super()._dump_generations(inputs, outputs, gts, scores, infos, dump_path)

    def _note_training(self) -> None:
        """Note the training on the last round, which lasts until now."""
        round_ = self.session.log.last_round
        if round_ is not None and round_.step > self._noted:
            self._noted = round_.step
            self.session.log.add(Phase("train", round_.step, round_.phase.end, time.time()))


class PartialRolloutRayPPOTrainer(TrainerRun, RayPPOTrainer):
    """``RayPPOTrainer`` whose batches come from the driver; its arguments are ``TrainerRun``'s."""

    def _create_dataloader(self, train_dataset: Any, val_dataset: Any, collate_fn: Any, train_sampler: Any) -> None:
        super()._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)
        self._offer(self.train_dataloader)

    def init_workers(self) -> None:
        """As verl's; then connect the recipe's parts to the replicas and workers that it made."""
        with standalone_engines() if self.settings.separate else nullcontext():
            super().init_workers()
        self._connect(self.async_rollout_manager)

    def fit(self) -> None:
        """As ``play``."""
        self.play(super().fit)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        self._load_data()

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        self._choose_pass()
        batch.meta_info[loss.VERSION] = self.global_steps - 1
        return super()._get_gen_batch(batch)
