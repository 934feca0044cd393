"""``TrainerRun``, the base class that the recipe's trainers share, and the trainer over verl's ``RayPPOTrainer``.

A trainer inherits from ``TrainerRun`` and then from a trainer of verl. verl's class has the parts and the loop;
``TrainerRun`` adds the run's files, driver, stop signals and metrics. verl's ``fit`` runs unchanged, under PR and
noPR::

    SlotLoader -> N placeholders -> PartialRolloutAgentLoopManager.generate_sequences (Driver.next_batch) -> full batch
      -> log-probs, reward, advantage, update (verl) -> weight sync (RecipeCheckpointManager), which ends the step

With ``partial_rollout.enable=False`` loader, manager and batches are verl's own. ``training/v1`` has verl's v1 trainer.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from omegaconf import OmegaConf
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import AdaptiveKLController
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import need_critic

import recipe.partial_rollout.engine.replica as replica
from recipe.partial_rollout.checkpoint.run_checkpoints import claim_retention
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.records.run_log import Checkpoint, Ended, Phase
from recipe.partial_rollout.rollout.driver import Driver, connect
from recipe.partial_rollout.rollout.prompt_source import PromptSource, SlotLoader, TrainingSteps
from recipe.partial_rollout.rollout.recorder import Recorder, run_settings
from recipe.partial_rollout.rollout.replicas import ReplicaSlots, ServerControl
from recipe.partial_rollout.rollout.run_files import RunFiles
from recipe.partial_rollout.rollout.stop import StopSignals, StopTraining
from recipe.partial_rollout.terminal import say
from recipe.partial_rollout.training import loss
from recipe.partial_rollout.training.reward_info import averaged, colocated_scores, per_sample, writable
from recipe.partial_rollout.training.step_log import StepLog, last_lines
from recipe.partial_rollout.training.trackers import open_run
from recipe.partial_rollout.training.weight_transfer import RecipeCheckpointManager
from recipe.partial_rollout.waits import ERROR_LOG
from recipe.partial_rollout.worker.pictures import Pictures
from verl_ext.standalone_engines import standalone_engines
from verl_ext.tracking_observer import observed_tracking

KL_COEFFICIENT = "kl_coefficient"
"""file of a checkpoint with the adaptive coefficient of the KL penalty on rewards"""
_VerlsTrainer: Any = object
"""base of ``TrainerRun`` for type checks; at run time ``super()`` is the verl trainer that a subclass adds"""


class TrainerRun(_VerlsTrainer):
    """The run's part of a trainer; reads ``config.partial_rollout``.

    Args:
        settings: the run's settings.
        files: the run's files, after ``RunFiles.begin``.
        args, kwargs: arguments of verl's trainer.
    """

    checkpoint_manager: Any

    def __init__(self, config: Any, *args: Any, settings: PartialRolloutConfig, files: RunFiles, **kwargs: Any) -> None:
        self.settings, self.files = settings, files
        self.stop = StopSignals.of_process()
        self.driver: Driver | None = None
        """the driver of PR, set once verl has made the workers; None under noPR"""
        self.proximal = loss.ProximalPolicy.of(config, settings)
        self._noted = 0
        """the last step whose training phase this process has logged; 0: none"""
        # verl looks the replica class up when it makes the workers.
        replica.register()
        # Clear verl's ``max_*_ckpt_to_keep``: the recipe removes old checkpoints itself, after the new one is sealed.
        claim_retention(config.trainer, critic=need_critic(config))
        # Last: verl's constructor makes the dataloader, and ``_offer`` reads what is set above.
        super().__init__(config, *args, **kwargs)

    @property
    def exhausted(self) -> bool:
        """Whether the data has ended with fewer prompts left than a batch needs."""
        return self.driver is not None and self.driver.exhausted

    def _offer(self, loader: Any) -> None:
        """Take over verl's ``loader``, and limit the training to the steps that its data suffice for.

        Under PR, prompts come from it through a ``PromptSource``, and verl gets a ``SlotLoader``.
        """
        epochs, wanted = self.config.trainer.total_epochs, self.total_training_steps
        # verl validates and saves in the step that it expects to be the last.
        self.total_training_steps = min(wanted, len(loader) * epochs)
        if self.total_training_steps < wanted:
            say(
                f"the training will end after step {self.total_training_steps} of trainer.total_training_steps={wanted}: "
                f"the data has no more prompts (trainer.total_epochs={epochs})"
            )
        # The workers are made later: their learning rates decay to the last step that there is.
        for part in ("actor_rollout_ref.actor", "critic"):
            OmegaConf.update(self.config, f"{part}.optim.total_training_steps", self.total_training_steps)
        self.steps = steps = TrainingSteps(len(loader), epochs, self.total_training_steps)
        self.step_log = StepLog(self.config, self.settings, self.total_training_steps)
        if self.settings.enable:
            size = self.settings.batch_groups
            self._source = PromptSource(loader, total=steps.offered(self.settings) * size)
            self.train_dataloader = SlotLoader(
                steps.per_epoch, size, lambda: self.files.completed_step, lambda: self.exhausted
            )

    def _connect(self, rollout: Any) -> None:
        """Connect the recipe's parts to verl's replicas and workers; ``rollout`` is the agent-loop manager."""
        settings = self.settings
        if settings.enable:
            # The workers have verl's loss until now.
            self.send_loss()
        self.recorder = recorder = self._recorder_of_replicas()
        if settings.enable:
            # After the slots: the manager admits by them from its first version on.
            self.driver = connect(
                recorder,
                self.steps,
                self._source,
                workers=rollout.agent_loop_workers,
                spawn=rollout.spawn,
                trainers=self.actor_rollout_wg.workers,
                stop=self.stop,
            )
        pictures = Pictures(self.config, self.tokenizer, self.processor, type(self.train_dataset))
        rollout.connect(
            recorder,
            self.steps,
            self.stop,
            on_batch=partial(self.step_log.show, tokenizer=self.tokenizer),
            pad_id=self.tokenizer.pad_token_id,
            driver=self.driver,
            pictures=pictures if settings.enable and pictures.known else None,
        )
        # A validation alone begins no version that the driver would report to the manager.
        self.checkpoint_manager = RecipeCheckpointManager(
            self.checkpoint_manager, recorder, self._end_step, self.driver if self.files.trains else None
        )

    def _recorder_of_replicas(self) -> Recorder:
        """Return the recorder of the run, with the replicas that verl has started and their slots."""
        settings = self.settings
        control = ServerControl(
            self.llm_server_manager.get_replicas(),
            settings.deadlines.interrupt_s,
            restarts=settings.failures.replica_restarts,
        )
        lengths = self.config.actor_rollout_ref.rollout
        slots = ReplicaSlots(
            settings.slots_per_replica,
            given=settings.slots_given,
            # Asked of vLLM, which knows it only once it has profiled the model.
            kv_tokens=asyncio.run(control.kv_tokens()),
            prompt=lengths.prompt_length,
            response=lengths.response_length,
            replicas=len(control.addresses),
        )
        say(slots.describe())
        strategy = self.config.actor_rollout_ref.actor.strategy
        facts = run_settings(
            settings,
            self.steps,
            slots,
            replicas=len(control.addresses),
            resumed=self.files.checkpoints.resumed_step,
            experiment=self.config.trainer.experiment_name,
            trainer=f"{strategy} under v1" if self.config.trainer.use_v1 else strategy,
        )
        return Recorder(settings, self.files.open_log(facts, control.addresses), control, slots)

    def send_loss(self) -> None:
        """Give the actor workers the loss that the config asks for; this also registers the recipe's losses there."""
        actor = self.config.actor_rollout_ref.actor
        self.actor_rollout_wg.set_loss_fn(loss.worker_loss(actor, self.settings, self.proximal))

    def run_fit(self, loop: Callable[[], object]) -> None:
        """Run verl's training ``loop``, from the resumed checkpoint if any.

        Raises:
            StopTraining: after Ctrl-C, SIGTERM or SIGHUP. If a step is complete and ``trainer.save_freq`` is positive,
                a checkpoint of the last completed step is saved before. Under PR it has the samples in flight.
        """
        files = self.files
        if not files.trains:
            self._only_validate(loop)
            return
        with self.stop.caught():
            # An earlier process of the run may have left it.
            (files.directory / ERROR_LOG).unlink(missing_ok=True)
            if files.checkpoints.resumed_step >= self.total_training_steps:
                say(f"nothing to do: {files.checkpoints.chosen} is the checkpoint of the last step")
                self._note_end(complete=True)
                return
            # verl makes its trackers in ``fit``; they read their ids from the environment.
            open_run(self.config.trainer.logger, files.checkpoints.run)
            # Within it, so that the trackers show a run as failed whose last checkpoint cannot be saved.
            with observed_tracking(self._observe_step, self._after_log, files.metrics):
                try:
                    # 860,000 objects that imports made stay: full collections walk them no more (1.9 s each on two cores).
                    gc.freeze()
                    loop()
                    if self._cut_short:
                        self._save_where_data_ended()
                except StopTraining:
                    self._save_before_stop()
                    raise
                except Exception as error:
                    # A sample's traceback is in the manager's process, which ends with this one.
                    if self.driver is not None:
                        asyncio.run(self.driver.explain(error))
                    raise
                finally:
                    self.step_log.end()
        # The last save and the trackers' end may have failed until here.
        self._note_end(complete=True)
        say(last_lines(self.config, files.completed_step))

    def _only_validate(self, loop: Callable[[], object]) -> None:
        """Validate the weights once, and log the scores to ``validation.jsonl``.

        verl's ``fit`` returns after the validation before the first step, which ``val_before_train`` makes it run.
        """
        self.config.trainer.val_before_train = True
        open_run(self.config.trainer.logger, None)
        file = self.files.metrics.with_name("validation.jsonl")
        with self.stop.caught(), observed_tracking(self._observe_step, file=file):
            loop()
            # A validation that is cut short ends as if it were whole.
            self.stop.check()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        """End the step, save verl's checkpoint (PR: and everything in flight), and mark it complete."""
        # It comes before the step's weight sync, which ends a step that saves nothing.
        step = self._end_step(self.global_steps)
        in_flight = {} if self.driver is None else self.driver.in_flight()
        self.files.checkpoints.save(step, in_flight, self._save_trainer)
        # On disk now: a checkpoint that outlives the machine must be in the log that an audit reads.
        self.recorder.log.add(Checkpoint(step), sync=True)

    def _save_trainer(self) -> None:
        """Save verl's checkpoint, and beside it the adaptive KL coefficient, which verl's lacks."""
        super()._save_checkpoint()
        if (controller := self._adaptive_kl) is not None:
            path = self.files.checkpoints.step_dir(self.global_steps) / KL_COEFFICIENT
            path.write_text(repr(float(controller.value)))

    def _load_checkpoint(self) -> None:
        """Load the trainer's part of the checkpoint to resume, if there is one."""
        self.global_steps = 0
        trainer, chosen = self.config.trainer, self.files.checkpoints.chosen
        if chosen is None:
            return
        # verl would search for a checkpoint itself; this one has been verified.
        trainer.resume_mode, trainer.resume_from_path = "resume_path", str(chosen)
        super()._load_checkpoint()
        if (controller := self._adaptive_kl) is not None:
            if (chosen / KL_COEFFICIENT).exists():
                controller.value = float((chosen / KL_COEFFICIENT).read_text())
            else:
                say(f"{chosen} has no coefficient of algorithm.kl_ctrl: the coefficient starts at {controller.value:g}")

    @property
    def _adaptive_kl(self) -> AdaptiveKLController | None:
        """verl's controller of the KL penalty on rewards, if it adapts its coefficient."""
        controller = getattr(self, "kl_ctrl_in_reward", None)
        return controller if isinstance(controller, AdaptiveKLController) else None

    def _load_data(self) -> None:
        """Restore the position in the data from the checkpoint to resume, if there is one.

        PR: also restore everything in flight. noPR: verl has restored its loader; only the end of an epoch needs more.
        """
        files, loader = self.files, self.train_dataloader
        chosen = files.checkpoints.chosen
        if chosen is None or not files.trains:
            return
        if self.driver is not None:
            asyncio.run(self.driver.load(files.checkpoints))
        elif self.global_steps % self.steps.per_epoch == 0:
            # verl starts the sampler over at the end of an epoch, so the next one would repeat the order of the first.
            loader.load_state_dict(torch.load(chosen / "data.pt", weights_only=False))
            # Nothing is left of that epoch; reading it moves the sampler on to the next one.
            deque(loader, maxlen=0)

    def _save_where_data_ended(self) -> None:
        """Save the last step if the data ended early (dynamic sampling); verl saves only the last step that it expects."""
        step, every = self.files.completed_step, self.config.trainer.save_freq
        say(self.step_log.data_ended(step))
        if every > 0 and step % every and step > self.files.checkpoints.resumed_step:
            # ``fit`` has counted on to a step that got no batch.
            self.global_steps = step
            self._save_checkpoint()

    def _save_before_stop(self) -> None:
        """Save a checkpoint of the last completed step, if ``trainer.save_freq`` is positive, and log the stop.

        Under PR it has the tokens decoded since that step, except those of unfinished conversations.
        """
        step = self.files.completed_step
        if step and self.config.trainer.save_freq > 0:
            self.global_steps = step
            self._save_checkpoint()
            say(f"saved {self.files.checkpoints.step_dir(step)}; trainer.resume_mode=auto resumes from it")
        self._note_end(complete=False)

    def _note_end(self, *, complete: bool) -> None:
        """Note in the log that the training is over, or was stopped."""
        exhausted = complete and self._cut_short
        self.recorder.log.add(Ended(self.files.completed_step, complete=complete, exhausted=exhausted), sync=True)

    @property
    def _cut_short(self) -> bool:
        """Whether dynamic sampling has consumed the data before the last step."""
        return self.settings.group_filter is not None and self.exhausted

    # -- steps -----------------------------------------------------------------------------------------------------

    def _end_step(self, step: int | None) -> int:
        """Mark ``step`` as completed, unless it is; return the last completed step. None: change nothing.

        A checkpoint that is saved afterwards has the number of this step.
        """
        files = self.files
        # verl ends a step by its save or by its weight sync, whichever comes first.
        if step is not None and step != files.completed_step:
            if self.driver is not None:
                # Before the number changes: a checkpoint of a step needs its groups recorded as trained.
                asyncio.run(self.driver.finish_step())
            files.completed_step = step
        return files.completed_step

    def _choose_pass(self) -> None:
        """Switch verl's pass over the batch off for this step if the update gives the proximal log-probs, else on."""
        if self.proximal.from_update:
            # ``fit`` reads this key anew in each step.
            correction = self.config.algorithm.rollout_correction
            correction.bypass_mode = not self.proximal.recomputes(self.global_steps)

    def _compute_reward_colocate(self, batch: DataProto) -> DataProto:
        return colocated_scores(self.reward_loop_manager, batch, self.settings.deadlines.reward_s)

    def _observe_step(self, data: dict[str, Any], step: int) -> dict[str, Any]:
        """Add the recipe's metrics to what verl logs for a step."""
        ours = {f"partial_rollout/{key}": value for key, value in self.recorder.metrics.items()}
        # The recorder does not know when a step is logged: a validation adds figures after the batch's.
        self.recorder.metrics.clear()
        return self.step_log.extend({**loss.logged(data), **ours}, step)

    def _after_log(self, data: dict[str, Any], step: int) -> None:
        """Finish a step that verl has logged: record its training phase, send its pictures.

        Raises:
            StopTraining: a signal has come. (During a round ``Driver.next_batch`` raises it.)
        """
        self._note_training()
        self.step_log.close(step, self.recorder.log.last_round)
        # After the last step the training is complete, whatever signal has come.
        if step < self.steps.last:
            self.stop.check()

    def _validate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Validate as verl does. A stop cuts it short: the step that it belongs to is still logged, and is the last."""
        self._note_training()
        try:
            self.stop.check()
            return super()._validate(*args, **kwargs)
        except StopTraining:
            # Raised from here, the stop would lose the metrics of the trained step; ``_after_log`` raises it.
            return {"partial_rollout/validation_cut_short": 1.0}

    def _val_metrics_update(
        self,
        data_sources: Any,
        sample_uids: Any,
        reward_extra_infos_dict: dict[str, list[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        # verl takes a column for numbers or text by its first value, and raises where they are mixed.
        infos = averaged(per_sample(reward_extra_infos_dict), data_sources)
        return super()._val_metrics_update(data_sources, sample_uids, infos, *args, **kwargs)

    def _dump_generations(
        self, inputs: Any, outputs: Any, gts: Any, scores: Any, reward_extra_infos_dict: dict[str, Any], dump_path: str
    ) -> None:
        # Without this, a value that cannot be written would end the training at the next dump.
        infos = {key: [*map(writable, values)] for key, values in per_sample(reward_extra_infos_dict).items()}
        super()._dump_generations(inputs, outputs, [*map(writable, gts)], scores, infos, dump_path)

    def _note_training(self) -> None:
        """Write the training phase of the last round to the log, once a round: from the end of the round until now."""
        round_ = self.recorder.log.last_round
        # A validation and the log of a step both come here, the validation first if there is one.
        if round_ is not None and round_.step > self._noted:
            self._noted = round_.step
            self.recorder.log.add(Phase("train", round_.step, round_.phase.end, time.time()))


class PartialRolloutRayPPOTrainer(TrainerRun, RayPPOTrainer):
    """``RayPPOTrainer`` whose batches come from the driver; its arguments are ``TrainerRun``'s."""

    def _create_dataloader(self, train_dataset: Any, val_dataset: Any, collate_fn: Any, train_sampler: Any) -> None:
        super()._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)
        self._offer(self.train_dataloader)

    def init_workers(self) -> None:
        """Let verl make replicas and workers, and connect the recipe's parts to them."""
        with standalone_engines() if self.settings.separate else nullcontext():
            super().init_workers()
        self._connect(self.async_rollout_manager)

    def fit(self) -> None:
        """Run verl's ``fit`` through ``run_fit``."""
        self.run_fit(super().fit)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        self._load_data()

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        self._choose_pass()
        # verl hands a batch's meta information on to its update; step s trains from version s - 1.
        batch.meta_info[loss.VERSION] = self.global_steps - 1
        return super()._get_gen_batch(batch)
