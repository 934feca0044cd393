"""The decoupled loss against verl's vanilla PPO, its equation in float64, and without the pass over the batch."""

import math
import pickle
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_vanilla, get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics, compute_rollout_correction_weights
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.training import loss
from recipe.partial_rollout.training.loss import corrected_ppo_loss, decoupled_ppo
from verl_ext.reported_entropy import REPORTED

AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
ROWS, WIDTH = 6, 9


def build_config(**fields):
    return ActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, **fields)


def build_batch(seed, *, spread=0.5, dtype=torch.float32):
    """Random log-probs of three policies, advantages of both signs, and a ragged mask with one row fully masked."""
    generator = torch.Generator().manual_seed(seed)

    def random(scale):
        return scale * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    lengths[seed % ROWS] = 0
    behaviour = -random(1.0).abs()
    proximal = behaviour + random(spread)
    batch = {
        "behaviour": behaviour,
        "proximal": proximal,
        "current": proximal + random(spread),
        "advantages": random(1.0),
        "mask": (torch.arange(WIDTH) < lengths[:, None]).double(),
    }
    return {key: value.to(dtype) for key, value in batch.items()}


def weights_of(batch, threshold=2.0, level="token"):
    ratio = batch["proximal"] - batch["behaviour"]
    return compute_rollout_correction_weights(ratio, batch["mask"], level, threshold)[0]


def loss_and_gradient(function, batch, weights, config, agg_mode):
    current = batch["current"].clone().requires_grad_()
    value, metrics = function(
        old_log_prob=batch["proximal"],
        log_prob=current,
        advantages=batch["advantages"],
        response_mask=batch["mask"],
        loss_agg_mode=agg_mode,
        config=config,
        rollout_is_weights=weights,
    )
    value.backward()
    return value.item(), current.grad, metrics


def reference(batch, config, *, cap, agg_mode):
    """Equation 5 and its derivative, token by token in float64: (loss, gradient [B, R])."""
    rows = {key: value.double().numpy() for key, value in batch.items()}
    terms, slopes = np.zeros((ROWS, WIDTH)), np.zeros((ROWS, WIDTH))
    for b, t in np.ndindex(ROWS, WIDTH):
        a = rows["advantages"][b, t]
        w = min(math.exp(rows["proximal"][b, t] - rows["behaviour"][b, t]), cap)
        r = math.exp(rows["current"][b, t] - rows["proximal"][b, t])
        clipped = min(max(r, 1 - config.clip_ratio_low), 1 + config.clip_ratio_high)
        value, slope = (r * a, r * a) if r * a <= clipped * a else (clipped * a, 0.0)
        if config.clip_ratio_c is not None and a < 0 and value < config.clip_ratio_c * a:
            value, slope = config.clip_ratio_c * a, 0.0
        terms[b, t], slopes[b, t] = -w * value, -w * slope
    share = token_shares(rows["mask"], agg_mode)
    return float((terms * share).sum()), slopes * share


def token_shares(mask, agg_mode):
    """What a token's loss is multiplied by in each aggregation mode, [B, R]."""
    lengths = mask.sum(1, keepdims=True)
    sequences = (lengths > 0).sum()
    return {
        "token-mean": mask / mask.sum(),
        "token-sum": mask,
        "seq-mean-token-sum": mask / sequences,
        "seq-mean-token-mean": mask / np.maximum(lengths, 1) / sequences,
        "seq-mean-token-sum-norm": mask / sequences / WIDTH,
    }[agg_mode]


@pytest.mark.parametrize("agg_mode", AGG_MODES)
@pytest.mark.parametrize("seed", range(3))
def test_equals_verls_vanilla_ppo_where_behaviour_is_proximal(agg_mode, seed):
    batch = build_batch(seed)
    batch["behaviour"] = batch["proximal"]
    config = build_config(clip_ratio_high=0.28)
    ours, gradient, metrics = loss_and_gradient(decoupled_ppo, batch, weights_of(batch), config, agg_mode)
    theirs, expected, figures = loss_and_gradient(compute_policy_loss_vanilla, batch, None, config, agg_mode)
    assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)
    assert metrics == pytest.approx(figures, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] > 0


@pytest.mark.parametrize("agg_mode", AGG_MODES)
@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("seed", range(2))
def test_equals_the_equation_in_float64_for_three_different_policies(agg_mode, dual_clip, seed):
    config = build_config(clip_ratio_low=0.2, clip_ratio_high=0.4, clip_ratio_c=dual_clip)
    # verl's seq-mean-token-mean adds 1e-8 to each length.
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 1e-5)):
        batch = build_batch(seed, dtype=dtype)
        expected, slopes = reference(batch, config, cap=1.5, agg_mode=agg_mode)
        value, gradient, _ = loss_and_gradient(decoupled_ppo, batch, weights_of(batch, 1.5), config, agg_mode)
        assert value == pytest.approx(expected, rel=tolerance, abs=tolerance)
        np.testing.assert_allclose(gradient.numpy(), slopes, rtol=tolerance, atol=tolerance)


def test_it_never_trains_without_weights():
    with pytest.raises(RuntimeError, match="rollout_is_weights"):
        loss_and_gradient(decoupled_ppo, build_batch(0), None, build_config(), "token-mean")


def build_micro_batch(seed, **facts):
    """A padded micro-batch as verl's trainer sends it: (data, model_output), prompts of 1 to 3 tokens, ragged responses."""
    batch = build_batch(seed)
    # A response of no tokens does not reach the trainer; a masked one does.
    lengths = batch["mask"].sum(1).long().clamp(min=1)
    response = (torch.arange(WIDTH) < lengths[:, None]).long()
    prompts = torch.arange(ROWS) % 3 + 1
    attention = torch.cat([(torch.arange(3) >= 3 - prompts[:, None]).long(), response], dim=1)
    data = TensorDict(
        {
            "prompts": attention[:, :3],
            "responses": response,
            "input_ids": attention.clone(),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": batch["mask"].long(),
            "advantages": batch["advantages"],
            "old_log_probs": batch["proximal"],
            "rollout_log_probs": batch["behaviour"],
            "rollout_versions": torch.where(response > 0, seed % 3, -1).int(),
        },
        batch_size=ROWS,
    )
    data = left_right_2_no_padding(data)
    tokens = int(batch["mask"].sum())
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=ROWS, **facts)
    # verl's engines give one log-prob a position, of the next token: the response's stand one to the left.
    flat = []
    for row, prompt, length in zip(batch["current"], prompts.tolist(), lengths.tolist(), strict=True):
        flat.append(torch.cat([torch.zeros(prompt - 1), row[:length], torch.zeros(1)]))
    return batch, data, {"log_probs": torch.nested.as_nested_tensor(flat, layout=torch.jagged)}


def run_loss(function, data, output, **fields):
    flat = output["log_probs"].values().detach().clone().requires_grad_()
    nested = torch.nested.nested_tensor_from_jagged(flat, offsets=output["log_probs"].offsets())
    value, metrics = function(config=build_config(**fields), model_output={"log_probs": nested}, data=data)
    value.backward()
    return value.item(), flat.grad, metrics


def from_update(version=4, check=False, threshold=2.0, level="token"):
    return {
        loss.TRAINED_VERSION: version,
        loss.PROXIMAL_FROM_UPDATE: True,
        loss.PROXIMAL_CHECK: check,
        loss.WEIGHT_LEVEL: level,
        loss.WEIGHT_THRESHOLD: threshold,
    }


def test_loss_of_the_worker_is_verls_where_the_proximal_policy_is_recomputed():
    _, data, output = build_micro_batch(1)
    ours, theirs = run_loss(corrected_ppo_loss, data, output), run_loss(ppo_loss, data, output)
    assert ours[0] == theirs[0]
    torch.testing.assert_close(ours[1], theirs[1])


def padded_loss(batch, data, actor, region, *, from_update):
    """(value, gradient [B, R]) of the policy loss that ``actor`` names, which verl's losses compute on padded tensors."""
    current = batch["current"].clone().requires_grad_()
    proximal = current.detach() if from_update else batch["proximal"]
    level = loss.weight_level(actor.policy_loss.loss_mode)
    weights = compute_rollout_correction_weights(proximal - batch["behaviour"], batch["mask"], level, 2.0)[0]
    if region is not None:
        outside = region.outside(current.detach(), batch["behaviour"], batch["advantages"], batch["mask"])
        weights = weights.masked_fill(outside, 0)
    data["old_log_probs"], data["rollout_is_weights"] = batch["proximal"], weights
    config = omega_conf_to_dataclass(actor)
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=data["batch_num_tokens"], global_batch_size=ROWS, loss_scale_factor=None
    )
    value, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
        old_log_prob=proximal,
        log_prob=current,
        advantages=batch["advantages"],
        response_mask=batch["mask"].bool(),
        loss_agg_mode=actor.loss_agg_mode,
        config=config,
        rollout_is_weights=weights,
    )
    value.backward()
    return value.item(), current.grad


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("made_by", ["update", "pass"])
@pytest.mark.parametrize("name", sorted(path.stem for path in (main_ppo.CONF_DIR / "algorithm").glob("*.yaml")))
def test_packed_rows_in_micro_batches_train_as_the_padded_batch_does(composed_config, name, made_by, rows):
    """Packed, as Megatron's engine feeds the loss: no padding, and micro-batches of ``rows`` whose losses are summed."""
    config = composed_config("quickstart_cpu", f"algorithm={name}")
    main_ppo.wire(config)
    actor, settings = config.actor_rollout_ref.actor, PartialRolloutConfig.from_config(config)
    facts = from_update(level=loss.weight_level(actor.policy_loss.loss_mode)) if made_by == "update" else {}
    batch, data, output = build_micro_batch(5, **{loss.TRAINED_VERSION: 4} | facts)
    function = loss.worker_loss(actor, settings)
    expected, slopes = padded_loss(batch, data, actor, function.keywords["region"], from_update=bool(facts))
    packed, value = [row.clone().requires_grad_() for row in output["log_probs"].unbind()], 0.0
    for start in range(0, ROWS, rows):
        part = {"log_probs": torch.nested.as_nested_tensor(packed[start : start + rows], layout=torch.jagged)}
        value += function(model_output=part, data=tu.index_select_tensor_dict(data, list(range(start, start + rows))))[
            0
        ]
    value.backward()
    assert value.item() == pytest.approx(expected, abs=1e-6)
    assert slopes.any(1).sum() >= ROWS - 2, "rows that train"
    for row, slope, length in zip(packed, slopes, (data["responses"] > 0).sum(1).tolist(), strict=True):
        ours = row.grad[-length - 1 : -1]
        torch.testing.assert_close(ours, slope[:length], atol=1e-6, rtol=1e-5)
        assert torch.equal(row.grad.count_nonzero(), ours.count_nonzero()) and not slope[length:].any()


@pytest.mark.parametrize("loss_mode", ["decoupled_ppo", "gspo", "sapo", "gpg"])
@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
def test_one_update_trains_as_after_a_pass_over_the_batch(loss_mode, level):
    """The pass gives the log-probs from which the update starts: value and gradient are the same without it."""
    batch, data, output = build_micro_batch(5, **from_update(level=level))
    mode = {"policy_loss": {"loss_mode": loss_mode}}
    value, gradient, metrics = run_loss(corrected_ppo_loss, data, output, **mode)
    current = batch["current"] * (data["responses"] > 0)
    weights, _ = compute_rollout_correction_weights(current - batch["behaviour"], batch["mask"], level, 2.0)
    tu.assign_non_tensor(data, **{loss.PROXIMAL_FROM_UPDATE: False})
    data["old_log_probs"], data["rollout_is_weights"] = current, weights
    expected, slopes, _ = run_loss(corrected_ppo_loss, data, output, **mode)
    assert value == pytest.approx(expected, abs=1e-6)
    assert gradient.any()
    torch.testing.assert_close(gradient, slopes, atol=1e-6, rtol=1e-5)
    mean = agg_loss(weights, batch["mask"], "token-mean")
    assert metrics["actor/partial_rollout/behaviour_weight/mean"].aggregate() == pytest.approx(mean.item(), abs=1e-6)


def test_update_without_weights_starts_from_the_current_policy():
    batch, data, output = build_micro_batch(5, **from_update(level=None))
    value, gradient, metrics = run_loss(corrected_ppo_loss, data, output)
    data["old_log_probs"] = batch["current"] * (data["responses"] > 0)
    expected, slopes, _ = run_loss(ppo_loss, data, output)
    assert value == expected and torch.equal(gradient, slopes)
    assert "actor/partial_rollout/behaviour_weight/mean" not in metrics


def test_loss_reports_verls_divergence_and_the_gap_of_kept_kv():
    batch, data, output = build_micro_batch(5, **from_update(version=2))
    behaviour, current, mask = batch["behaviour"], batch["current"], batch["mask"]
    versions = data["rollout_versions"].clone()
    versions[:, 0] = 0
    data["rollout_versions"] = versions
    metrics = {key: each for key, each in run_loss(corrected_ppo_loss, data, output)[2].items() if "partial" in key}
    theirs = compute_offpolicy_metrics(current, behaviour, mask)
    for name in ("kl", "k3_kl"):
        assert metrics[f"actor/partial_rollout/{name}"].aggregate() == pytest.approx(theirs[name], rel=1e-4)
    newest = (versions == 2) & (mask > 0)
    gap = (
        metrics["actor/partial_rollout/kv_gap"].aggregate() / metrics["actor/partial_rollout/kv_gap_share"].aggregate()
    )
    assert newest.sum() > 4
    assert gap == pytest.approx((current - behaviour).abs()[newest].mean().item(), rel=1e-4)


@pytest.mark.parametrize("name", [REPORTED, "entropy"])
@pytest.mark.parametrize("agg_mode", ["token-mean", "seq-mean-token-sum"])
def test_loss_reports_the_entropy_that_verl_logs_after_a_pass(name, agg_mode):
    batch, data, output = build_micro_batch(5, **from_update())
    entropy = batch["current"].square() * (data["responses"] > 0)
    output[name] = torch.nested.nested_tensor_from_jagged(
        output["log_probs"].values().square(), offsets=output["log_probs"].offsets()
    )
    config = build_config(loss_agg_mode=agg_mode, policy_loss={"loss_mode": "decoupled_ppo"})
    _, metrics = corrected_ppo_loss(config=config, model_output=output, data=data)
    verls = agg_loss(entropy, batch["mask"], agg_mode, global_batch_size=ROWS)
    assert metrics["actor/partial_rollout/entropy"].aggregate() == pytest.approx(verls.item(), rel=1e-5)


def test_difference_that_the_pass_makes_is_measured_on_request():
    batch, data, output = build_micro_batch(5, **from_update(check=True))
    expected = ((batch["current"] - batch["proximal"]).abs() * batch["mask"]).sum() / batch["mask"].sum()
    _, _, metrics = run_loss(corrected_ppo_loss, data, output, policy_loss={"loss_mode": "decoupled_ppo"})
    assert metrics["actor/partial_rollout/proximal/error"].aggregate() == pytest.approx(expected.item(), abs=1e-6)
    tu.assign_non_tensor(data, **{loss.PROXIMAL_CHECK: False})
    assert "actor/partial_rollout/proximal/error" not in run_loss(corrected_ppo_loss, data, output)[2]


@pytest.mark.parametrize("masked", ["samples", "weights"])
def test_micro_batch_where_everything_is_masked_has_no_gradient(masked):
    _, data, output = build_micro_batch(5, **from_update(3, threshold="1e-9_1.0"))
    if masked == "samples":
        data["response_mask"] = torch.zeros_like(data["response_mask"])
    else:
        data["rollout_log_probs"] = data["rollout_log_probs"] - 9.0
    value, gradient, _ = run_loss(corrected_ppo_loss, data, output)
    assert value == 0 and not gradient.any()


def test_loss_function_brings_its_registration_to_the_process_that_unpickles_it():
    assert get_policy_loss_fn("decoupled_ppo") is decoupled_ppo
    payload = pickle.dumps(partial(corrected_ppo_loss, config=build_config()))
    program = (
        "import pickle, sys\n"
        "from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY\n"
        "assert 'decoupled_ppo' not in POLICY_LOSS_REGISTRY\n"
        "pickle.load(sys.stdin.buffer)\n"
        "assert 'decoupled_ppo' in POLICY_LOSS_REGISTRY\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=payload, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
