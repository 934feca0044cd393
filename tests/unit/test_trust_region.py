"""The region around the behaviour policy, in the worker's loss: against formulas in float64, and with every policy loss."""

import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from recipe.partial_rollout.config.choices import Correction, TrustRegion
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.training import loss
from recipe.partial_rollout.training.loss import BehaviourRegion, corrected_ppo_loss

ROWS, WIDTH, VERSION, CAP = 6, 9, 4, 1.5
LOW, HIGH = 0.3, 0.4
REGION = BehaviourRegion(LOW, HIGH, per_sequence=False)
AGG_MODES = ("token-mean", "seq-mean-token-mean")
TOKEN_LOSSES = ("decoupled_ppo", "sapo", "gpg", "cispo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")
FIELDS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.8}


def build_batch(seed, *, spread=0.4, updates=1):
    """Log-probs of three policies in float64, [ROWS, WIDTH]; in the first update of a batch two of them are the same."""
    generator = torch.Generator().manual_seed(seed)

    def random(scale):
        return scale * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    behaviour = -0.1 - random(1.0).abs()
    proximal = (behaviour + random(spread)).clamp(max=-0.01)
    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    response = (torch.arange(WIDTH) < lengths[:, None]).long()
    mask = response.clone()
    mask[seed % ROWS] = 0
    # An advantage a sequence, as the group estimators make; one of each sign at least.
    advantages = random(1.0)[:, :1].expand(ROWS, WIDTH) * (torch.arange(ROWS) % 2 * 2.0 - 1)[:, None]
    return {
        "behaviour": behaviour,
        "proximal": proximal,
        "current": (proximal + random(spread)).clamp(max=-0.01) if updates > 1 else proximal.clone(),
        "advantages": advantages.contiguous(),
        "mask": mask,
        "response": response,
        "versions": torch.where(response > 0, torch.randint(0, VERSION + 1, (ROWS, WIDTH), generator=generator), -1),
    }


def micro_batch(batch, *, from_update=False, level="token", tokens=None):
    """As verl's trainer sends it: prompts of 2 tokens, then the responses."""
    attention = torch.cat([torch.ones(ROWS, 2, dtype=torch.long), batch["response"]], dim=1)
    fields = {
        "prompts": torch.ones(ROWS, 2, dtype=torch.long),
        "responses": batch["response"],
        "input_ids": attention.clone(),
        "attention_mask": attention,
        "position_ids": attention.cumsum(1) - 1,
        "response_mask": batch["mask"],
        "advantages": batch["advantages"],
        "old_log_probs": batch["proximal"],
        "rollout_log_probs": batch["behaviour"],
        "rollout_versions": batch["versions"].int(),
    }
    if not from_update:
        ratio = batch["proximal"] - batch["behaviour"]
        fields["rollout_is_weights"] = compute_rollout_correction_weights(ratio, batch["mask"], level, CAP)[0]
    data = left_right_2_no_padding(TensorDict(fields, batch_size=ROWS))
    facts = {loss.TRAINED_VERSION: VERSION}
    if from_update:
        facts |= {loss.PROXIMAL_FROM_UPDATE: True, loss.WEIGHT_LEVEL: level, loss.WEIGHT_THRESHOLD: CAP}
    tokens = int(batch["mask"].sum()) if tokens is None else tokens
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=ROWS, **facts)
    return data


def run(
    batch, region=None, *, function=corrected_ppo_loss, data=None, loss_mode="decoupled_ppo", agg=AGG_MODES[0], **how
):
    """(loss, gradient [ROWS, WIDTH], metrics) of the worker's loss for one micro-batch."""
    lengths = batch["response"].sum(1).tolist()
    rows = [batch["current"][i, :n].clone().requires_grad_() for i, n in enumerate(lengths)]
    # verl's engines give one log-prob a position, of the next token: the response's stand one to the left.
    zero = torch.zeros(1, dtype=torch.float64)
    flat = torch.cat([part for row in rows for part in (zero, row, zero)])
    offsets = torch.tensor([0, *np.cumsum([n + 2 for n in lengths])])
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(flat, offsets=offsets)}
    fields = {**FIELDS, "policy_loss": PolicyLossConfig(loss_mode=loss_mode), "loss_agg_mode": agg}
    config = ActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, **fields)
    extra = {} if function is ppo_loss else {"region": region}
    torch.manual_seed(0)
    data = micro_batch(batch, **how) if data is None else data
    value, metrics = function(config=config, model_output=output, data=data, **extra)
    value.backward()
    gradient = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for i, row in enumerate(rows):
        gradient[i, : lengths[i]] = row.grad
    return value.item(), gradient, metrics


# -- the formulas, written again --------------------------------------------------------------------------------------


def ppo_term(ratio, advantage, low, high, dual):
    """Value of PPO's objective with dual clip for a token, and its derivative by the log-prob."""
    clipped = min(max(ratio, 1 - low), 1 + high)
    value, slope = (ratio * advantage,) * 2 if ratio * advantage <= clipped * advantage else (clipped * advantage, 0.0)
    if advantage < 0 and value < dual * advantage:
        value, slope = dual * advantage, 0.0
    return value, slope


def tokens_of(batch):
    """Fields of ``batch`` in float64, (row, column) of its generated tokens, and of those outside the region."""
    rows = {key: value.double().numpy() for key, value in batch.items()}
    generated = [at for at in np.ndindex(ROWS, WIDTH) if rows["mask"][at]]
    deltas = {at: rows["current"][at] - rows["behaviour"][at] for at in generated}
    moved = {at: delta for at, delta in deltas.items() if delta * rows["advantages"][at] > 0}
    return rows, generated, {at for at, delta in moved.items() if not 1 - LOW <= math.exp(delta) <= 1 + HIGH}


def reference(batch, *, from_update, agg):
    """Loss, gradient [ROWS, WIDTH] and the tokens outside, token by token in float64."""
    rows, generated, outside = tokens_of(batch)
    total, gradient = 0.0, np.zeros((ROWS, WIDTH))
    for at in generated:
        behaviour, current, proximal = (rows[key][at] for key in ("behaviour", "current", "proximal"))
        if from_update:
            proximal = current
        used = min(math.exp(proximal - behaviour), CAP)
        value, slope = ppo_term(math.exp(current - proximal), rows["advantages"][at], 0.2, 0.28, 1.8)
        value, slope = (0.0, 0.0) if at in outside else (used * value, used * slope)
        share = 1 / len(generated) if agg == "token-mean" else 1 / rows["mask"][at[0]].sum() / ROWS
        total -= share * value
        gradient[at] -= share * slope
    return total, gradient, outside


@pytest.mark.parametrize("agg", AGG_MODES)
@pytest.mark.parametrize("from_update", [False, True])
@pytest.mark.parametrize("updates", [1, 2])
def test_loss_and_gradient_are_those_of_the_formula(updates, from_update, agg):
    masked = kept = 0
    for seed in range(4):
        batch = build_batch(seed, updates=updates)
        expected, slopes, outside = reference(batch, from_update=from_update, agg=agg)
        value, gradient, metrics = run(batch, REGION, from_update=from_update, agg=agg)
        # verl's seq-mean-token-mean adds 1e-8 to each length.
        assert value == pytest.approx(expected, abs=1e-7)
        np.testing.assert_allclose(gradient.numpy(), slopes, atol=1e-7)
        share = metrics["actor/partial_rollout/trust_region/masked"].aggregate()
        assert share == pytest.approx(len(outside) / int(batch["mask"].sum()))
        masked, kept = masked + len(outside), kept + int((gradient != 0).sum())
    assert masked >= 4 and kept >= 4


@pytest.mark.parametrize("from_update", [False, True])
@pytest.mark.parametrize("agg", AGG_MODES)
def test_without_a_region_loss_and_gradient_are_bit_equal_to_verls_on_the_same_weights(agg, from_update):
    batch = build_batch(3, updates=2)
    data = micro_batch(batch, from_update=from_update)
    expected = data.clone(recurse=False)
    if from_update:
        expected["old_log_probs"] = torch.where(batch["response"] > 0, batch["current"], 0.0)
        log_ratio = expected["old_log_probs"] - batch["behaviour"]
        expected["rollout_is_weights"] = loss._behaviour_weights(log_ratio, batch["mask"], "token", CAP)
    ours, theirs = run(batch, data=data, agg=agg), run(batch, function=ppo_loss, data=expected, agg=agg)
    assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1])
    assert not [key for key in ours[2] if "trust_region" in key]


# -- every policy loss and level ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_mode", TOKEN_LOSSES)
def test_masked_token_loses_its_gradient_and_the_others_keep_theirs(loss_mode):
    batch = build_batch(1, updates=2)
    outside = torch.zeros(ROWS, WIDTH, dtype=torch.bool)
    for at in tokens_of(batch)[2]:
        outside[at] = True
    plain = run(batch, loss_mode=loss_mode)[1]
    regional = run(batch, REGION, loss_mode=loss_mode)[1]
    assert outside.any() and plain[outside].any() and regional.any()
    assert torch.equal(regional, plain.masked_fill(outside, 0))


@pytest.mark.parametrize("loss_mode", ["gspo", "geo_mean"])
def test_sequence_is_in_or_out_as_a_whole_where_the_loss_has_one_ratio_a_sequence(loss_mode):
    batch = build_batch(1, updates=2)
    tokens = batch["mask"].sum(1).clamp(min=1)
    means = ((batch["current"] - batch["behaviour"]) * batch["mask"]).sum(1) / tokens
    out = (means * batch["advantages"][:, 0] > 0) & ((means.exp() > 1.1) | (means.exp() < 0.9)) & (batch["mask"].any(1))
    region = BehaviourRegion(0.1, 0.1, per_sequence=True)
    plain = run(batch, loss_mode=loss_mode, level="geometric")[1]
    regional = run(batch, region, loss_mode=loss_mode, level="geometric")[1]
    assert out.any() and plain[out].any() and plain[~out].any()
    # geo_mean adds 1e-10 to a weight before it takes its logarithm.
    torch.testing.assert_close(regional, plain * ~out[:, None], atol=1e-9, rtol=0)


@pytest.mark.parametrize("from_update", [False, True])
def test_batch_that_is_masked_altogether_has_no_gradient_and_finite_metrics(from_update):
    batch = build_batch(2)
    batch["behaviour"] = batch["current"] - 2.0 * batch["advantages"].sign()
    region = BehaviourRegion(1e-3, 1e-3, per_sequence=False)
    value, gradient, metrics = run(batch, region, from_update=from_update)
    assert value == 0 and not gradient.any()
    parts = {key: metric.aggregate() for key, metric in metrics.items() if "partial_rollout" in key}
    assert parts["actor/partial_rollout/trust_region/masked"] == pytest.approx(1.0)
    assert np.isfinite(list(parts.values())).all()


@pytest.mark.parametrize("region", [None, REGION])
@pytest.mark.parametrize("from_update", [False, True])
def test_mini_batch_without_a_token_has_no_gradient_and_finite_metrics(region, from_update):
    batch = build_batch(2)
    data = micro_batch(batch, from_update=from_update, tokens=0)
    data["response_mask"] = torch.zeros_like(data["response_mask"])
    value, gradient, metrics = run(batch, region, data=data)
    assert value == 0 and not gradient.any()
    figures = [metric.aggregate() if hasattr(metric, "aggregate") else metric for metric in metrics.values()]
    assert np.isfinite(figures).all()
    assert tu.get_non_tensor_data(data, "batch_num_tokens", default=None) == 0


def test_masked_share_is_told_by_sign_and_by_age():
    batch = build_batch(7, updates=2)
    rows, generated, outside = tokens_of(batch)
    metrics = run(batch, REGION)[2]
    prefix = "actor/partial_rollout/trust_region/masked"
    found = {key.removeprefix(prefix): metric.aggregate() for key, metric in metrics.items() if key.startswith(prefix)}
    ages = [VERSION - rows["versions"][at] for at in outside]
    counts = {
        "": len(outside),
        "_positive": sum(rows["advantages"][at] > 0 for at in outside),
        "_negative": sum(rows["advantages"][at] < 0 for at in outside),
        "_age_0": ages.count(0),
        "_age_1": ages.count(1),
        "_age_2_plus": sum(age >= 2 for age in ages),
    }
    assert found == pytest.approx({key: count / len(generated) for key, count in counts.items()})
    assert min(counts["_positive"], counts["_negative"], counts["_age_2_plus"]) > 0


@pytest.mark.parametrize(
    ("settings", "mode", "wanted"),
    [
        (("none",), "vanilla", None),
        (("mask",), "decoupled_ppo", (0.2, 0.28, False)),
        (("mask", 0.5), "decoupled_ppo", (0.5, 0.28, False)),
        (("mask", None, 0.3), "decoupled_ppo", (0.2, 0.3, False)),
        (("mask",), "gspo", (0.2, 0.28, True)),
        (("auto",), "sapo", (0.2, 0.28, False)),
        (("auto",), "gspo", None),
        (("auto", None, None, "none"), "vanilla", None),
    ],
)
def test_bounds_are_the_losss_own_unless_they_are_set(settings, mode, wanted):
    """``auto`` masks where a token has a ratio of its own, and is corrected."""
    given = dict(zip(("kind", "low", "high", "correction"), settings, strict=False))
    ours = SimpleNamespace(
        trust_region=TrustRegion(given["kind"]),
        trust_region_low=given.get("low"),
        trust_region_high=given.get("high"),
        correction=Correction(given.get("correction", "decoupled")),
    )
    actor = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=0.28)
    actor.policy_loss = SimpleNamespace(loss_mode=mode)
    found = BehaviourRegion.of(ours, actor)
    assert found == (wanted and BehaviourRegion(*wanted))


def test_region_travels_to_the_worker_with_the_loss(composed_config):
    overrides = ("partial_rollout.trust_region=mask", "partial_rollout.trust_region_low=0.07")
    config = composed_config("quickstart_cpu", *overrides)
    settings = PartialRolloutConfig.from_config(config)
    sent = pickle.loads(pickle.dumps(loss.worker_loss(config.actor_rollout_ref.actor, settings)))
    assert sent.keywords["region"] == BehaviourRegion(0.07, 0.2, per_sequence=False)
    assert sent.func is corrected_ppo_loss


@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
def test_region_that_holds_everything_changes_no_bit(level):
    batch = build_batch(3, updates=2)
    wide = BehaviourRegion(1e9, 1e9, per_sequence=False)
    ours, theirs = run(batch, wide, level=level), run(batch, level=level)
    assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1])
