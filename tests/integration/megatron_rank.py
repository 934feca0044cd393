"""One process of a Megatron engine on a CPU: what it computes and trains, against Hugging Face and torch's AdamW.

``python megatron_rank.py OUT MODEL:TP:PP ...``, with RANK, WORLD_SIZE and MASTER_* as torch has them, writes the largest
differences of each case to ``OUT/<rank>.json``.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    ActorConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    PolicyLossConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from recipe.partial_rollout.training.loss import VERSION, ProximalPolicy, corrected_ppo_loss

ROWS, PROMPT, RESPONSE, TEMPERATURE, RATE, DECAY = 6, 8, 12, 0.7, 1e-3, 0.01
EPSILON = 1e-6
"""of Adam: its default would turn gradients that are all rounding into whole steps"""
PLAIN = {"strategy": "megatron", "rollout_n": 1, "use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 1}
ACTOR = ActorConfig(**PLAIN, entropy_coeff=0.01, policy_loss=PolicyLossConfig(loss_mode="vanilla"))
LOSS = partial(corrected_ppo_loss, ACTOR, policy=ProximalPolicy(from_update=False, granularity=None, threshold=None))


def build_engine(model, tp, pp):
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="megatron",
        model_config=HFModelConfig(path=model, override_config={"attn_implementation": "sdpa"}),
        engine_config=McoreEngineConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            vanilla_mbridge=True,
            dtype="float32",
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=1,
        ),
        optimizer_config=McoreOptimizerConfig(
            lr=RATE,
            lr_warmup_steps=0,
            total_training_steps=10,
            lr_decay_style="constant",
            weight_decay=DECAY,
            override_optimizer_config={"adam_eps": EPSILON},
        ),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def padded_batch(generator):
    """Prompts padded to the left, responses to the right; one token of the first response is a tool's."""
    mask = torch.zeros(ROWS, PROMPT + RESPONSE, dtype=torch.long)
    for row in mask:
        prompt, response = (
            int(torch.randint(low, high + 1, (), generator=generator)) for low, high in ((2, 8), (3, 12))
        )
        row[PROMPT - prompt : PROMPT + response] = 1
    ids = torch.randint(2, 512, mask.shape, generator=generator) * mask
    response_mask = mask[:, PROMPT:].clone()
    response_mask[0, 1] = 0
    columns = {"prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "input_ids": ids, "attention_mask": mask}
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    return TensorDict({**columns, "position_ids": position_ids, "response_mask": response_mask}, batch_size=[ROWS])


class Case:
    """The same rows for an engine, packed, and for Hugging Face's model, padded."""

    def __init__(self, engine, model):
        generator = torch.Generator().manual_seed(1)
        self.engine, self.batch = engine, padded_batch(generator)
        self.shown = self.batch["attention_mask"][:, PROMPT:]
        self.hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self.adam = torch.optim.AdamW(
            [
                {"params": [p for p in self.hf.parameters() if p.dim() > 1], "weight_decay": DECAY},
                {"params": [p for p in self.hf.parameters() if p.dim() == 1], "weight_decay": 0.0},
            ],
            lr=RATE,
            betas=McoreOptimizerConfig().betas,
            eps=EPSILON,
        )
        with torch.no_grad():
            start = self.hf_outputs()["log_probs"]
        noise = [torch.randn(start.shape, generator=generator) for _ in range(3)]
        self.old = start + 0.3 * noise[0] * self.shown
        engines_own = self.old + 0.3 * noise[1] * self.shown
        self.batch["old_log_probs"], self.batch["rollout_log_probs"] = self.old, engines_own
        self.batch["advantages"] = noise[2]
        self.batch["rollout_is_weights"] = (self.old - engines_own).exp().clamp(max=2) * self.batch["response_mask"]
        self.batch["rollout_versions"] = torch.zeros_like(self.batch["responses"])
        size = ROWS // engine.get_data_parallel_size()
        self.mine = slice(engine.get_data_parallel_rank() * size, (engine.get_data_parallel_rank() + 1) * size)

    def rows(self):
        """This rank's rows as verl's worker hands them to the engine."""
        packed = left_right_2_no_padding(self.batch[self.mine].clone())
        packed["temperature"] = torch.full((len(packed),), TEMPERATURE)
        plain = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1, "global_batch_size": ROWS, "sp_size": 1}
        plain[VERSION] = 0
        tu.assign_non_tensor(packed, calculate_entropy=True, **plain)
        return packed

    def hf_outputs(self):
        """Log-probs and entropy, each ``[rows, response]``."""
        inputs = {name: self.batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
        logits = self.hf(**inputs).logits[:, PROMPT - 1 : -1]
        log_probs = (logits / TEMPERATURE).log_softmax(-1)
        own = log_probs.gather(-1, self.batch["responses"][..., None])[..., 0]
        return {"log_probs": own * self.shown, "entropy": -(log_probs.exp() * log_probs).sum(-1) * self.shown}

    def differences(self):
        """The largest difference of each of this rank's outputs; none where a rank has none."""
        with self.engine.eval_mode():
            outputs = self.engine.infer_batch(self.rows())
        if not self.engine.is_mp_src_rank_with_outputs():
            return {}
        with torch.no_grad():
            pairs = self.hf_outputs()
        found = {name: no_padding_2_padding(outputs["model_output"][name], self.rows()) for name in pairs}
        return {
            name: float((found[name] * self.shown[self.mine] - theirs[self.mine]).abs().max())
            for name, theirs in pairs.items()
        }

    def update(self):
        """Train the engine's weights; the norm of the gradient, where this rank reports one."""
        with self.engine.train_mode():
            outputs = self.engine.train_batch(self.rows(), LOSS)
            self.engine.lr_scheduler_step()
        return outputs["metrics"].get("grad_norm") if "metrics" in outputs else None

    def step(self):
        """One update of both, Hugging Face's by the loss as the method states it; how far the gradients' norms differ."""
        ours, mask = self.update(), self.batch["response_mask"].float()
        costs = self.costs(**self.hf_outputs())
        self.adam.zero_grad()
        ((costs * mask).sum() / mask.sum()).backward()
        theirs = torch.nn.utils.clip_grad_norm_(self.hf.parameters(), 1.0)
        self.adam.step()
        return 0.0 if ours is None else abs(float(ours) / float(theirs) - 1)

    def costs(self, log_probs, entropy):
        advantages = self.batch["advantages"]
        ratio = (log_probs - self.old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        gain = torch.where(advantages < 0, torch.maximum(gain, ACTOR.clip_ratio_c * advantages), gain)
        return -self.batch["rollout_is_weights"] * gain - ACTOR.entropy_coeff * entropy

    def weights_difference(self):
        """The largest difference of an exported weight."""
        exported = {name: weight.detach().clone() for name, weight in self.engine.get_per_tensor_param()[0]}
        theirs = {name: weight for name, weight in self.hf.state_dict().items() if name in exported}
        tied = {"lm_head.weight"} if self.hf.config.tie_word_embeddings else set()
        assert set(self.hf.state_dict()) - set(exported) <= tied and len(theirs) == len(exported)
        return max(float((exported[name] - weight).abs().max()) for name, weight in theirs.items())


def trial(model, tp, pp, checkpoint):
    """Largest differences: of outputs, of weights after three steps, and of those with a restart before the third; and of
    the norms of the gradients, as a share of them."""
    engine = build_engine(model, tp, pp)
    case = Case(engine, model)
    found = case.differences()
    norms = [case.step(), case.step()]
    engine.save_checkpoint(checkpoint)
    found["grad_norm"] = max(*norms, case.step())
    found["weights"] = case.weights_difference()
    case.engine = build_engine(model, tp, pp)
    case.engine.load_checkpoint(checkpoint)
    case.update()
    found["resumed"] = case.weights_difference()
    mpu.destroy_model_parallel()
    return found


def main(out, *cases):
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for index, (model, tp, pp) in enumerate(case.split(":") for case in cases):
        found[cases[index]] = trial(model, int(tp), int(pp), f"{out}/checkpoint_{index}")
    Path(out, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
