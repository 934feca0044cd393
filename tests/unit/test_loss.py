"""The worker's loss, its weights and its region: against formulas in float64, verl's losses, without the pass too."""

import math
import pickle
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics, compute_rollout_correction_weights
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.training import loss
from recipe.partial_rollout.training.loss import BehaviourRegion, ProximalPolicy, corrected_ppo_loss

AGG_MODES = ("token-mean", "seq-mean-token-mean")
ROWS, WIDTH, VERSION, CAP = 6, 9, 4, 1.5
PROMPTS = [1, 2, 3, 1, 2, 3]
"""tokens of each row's prompt"""
LOW, HIGH = 0.3, 0.4
REGION = BehaviourRegion(LOW, HIGH, per_sequence=False)
TOKEN_LOSSES = ("vanilla", "sapo", "gpg", "cispo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")
CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
OURS = "actor/logged/"
MASKED = f"{OURS}partial_rollout/trust_region/masked"


def build_batch(seed, *, updates=2):
    """Log-probs of three policies in float64, [ROWS, WIDTH]; in the first update of a batch two of them are the same."""
    generator = torch.Generator().manual_seed(seed)

    def random(scale):
        return scale * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    behaviour = -0.1 - random(1.0).abs()
    proximal = (behaviour + random(0.4)).clamp(max=-0.01)
    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    response = (torch.arange(WIDTH) < lengths[:, None]).long()
    mask = response.clone()
    mask[seed % ROWS] = 0
    # An advantage a sequence, as the group estimators make; one of each sign at least.
    advantages = random(1.0)[:, :1].expand(ROWS, WIDTH) * (torch.arange(ROWS) % 2 * 2.0 - 1)[:, None]
    return {
        "behaviour": behaviour,
        "proximal": proximal,
        "current": (proximal + random(0.4)).clamp(max=-0.01) if updates > 1 else proximal.clone(),
        "advantages": advantages.contiguous(),
        "mask": mask,
        "response": response,
        "versions": torch.where(response > 0, torch.randint(0, VERSION + 1, (ROWS, WIDTH), generator=generator), -1),
    }


def weights_of(batch, proximal, granularity="token"):
    return compute_rollout_correction_weights(proximal - batch["behaviour"], batch["mask"], granularity, CAP)[0]


def micro_batch(batch, *, from_update=False, granularity="token", version=VERSION):
    """As verl's trainer sends it: prompts, then the responses, without padding."""
    prompts = (torch.arange(3) >= 3 - torch.tensor(PROMPTS)[:, None]).long()
    attention = torch.cat([prompts, batch["response"]], dim=1)
    fields = {
        "prompts": prompts,
        "responses": batch["response"],
        "input_ids": attention.clone(),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": batch["mask"],
        "advantages": batch["advantages"],
        "old_log_probs": batch["proximal"],
        "rollout_log_probs": batch["behaviour"],
        "rollout_versions": batch["versions"].int(),
    }
    if not from_update:
        fields["rollout_is_weights"] = weights_of(batch, batch["proximal"], granularity)
    data = left_right_2_no_padding(TensorDict(fields, batch_size=ROWS))
    told = {"dp_size": 1, "batch_num_tokens": int(batch["mask"].sum()), "global_batch_size": ROWS}
    tu.assign_non_tensor(data, **told, **{loss.VERSION: version})
    return data


def engine_rows(batch):
    """verl's engines give one log-prob a position, of the next token: the response's stand one to the left."""
    lengths = batch["response"].sum(1).tolist()
    return [
        torch.cat([torch.zeros(prompt - 1), row[:length], torch.zeros(1)]).requires_grad_()
        for prompt, row, length in zip(PROMPTS, batch["current"], lengths, strict=True)
    ]


def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def gradient_of(rows):
    """[ROWS, WIDTH] of the responses; nothing else has any."""
    gradient = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for i, (prompt, row) in enumerate(zip(PROMPTS, rows, strict=True)):
        own = row.grad[prompt - 1 : -1]
        assert own.count_nonzero() == row.grad.count_nonzero()
        gradient[i, : len(own)] = own
    return gradient


def run(
    batch,
    region=None,
    *,
    function=corrected_ppo_loss,
    data=None,
    loss_mode="vanilla",
    agg="token-mean",
    dual=1.8,
    entropy=False,
    size=ROWS,
    version=VERSION,
    from_update=False,
    granularity="token",
    cap=CAP,
    check_every=10,
):
    """(loss, gradient [ROWS, WIDTH], metrics) of the worker's loss in micro-batches of ``size``, all summed."""
    fields = {**CLIPS, "clip_ratio_c": dual or loss.NO_DUAL_CLIP, "policy_loss": PolicyLossConfig(loss_mode=loss_mode)}
    config = ActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, loss_agg_mode=agg, **fields)
    policy = ProximalPolicy(from_update, granularity, cap, check_every)
    extra = {} if function is ppo_loss else {"policy": policy, "region": region}
    if data is None:
        data = micro_batch(batch, from_update=from_update, granularity=granularity, version=version)
    rows, value, figures = engine_rows(batch), 0.0, defaultdict(float)
    torch.manual_seed(0)
    for start in range(0, ROWS, size):
        part = rows[start : start + size]
        output = {"log_probs": nested(part)}
        if entropy:
            output["entropy"] = nested([row.detach().square() for row in part])
        chosen = data if size == ROWS else tu.index_select_tensor_dict(data, list(range(start, start + size)))
        share, metrics = function(config=config, model_output=output, data=chosen, **extra)
        value = value + share
        for key, each in metrics.items():
            figures[key] += each.aggregate() if hasattr(each, "aggregate") else each
    value.backward()
    return value.item(), gradient_of(rows), dict(figures)


# -- the formulas, written again --------------------------------------------------------------------------------------


def ppo_term(ratio, advantage, dual):
    """Value of PPO's objective with dual clip for a token, and its derivative by the log-prob."""
    clipped = min(max(ratio, 1 - CLIPS["clip_ratio_low"]), 1 + CLIPS["clip_ratio_high"])
    value, slope = (ratio * advantage,) * 2 if ratio * advantage <= clipped * advantage else (clipped * advantage, 0.0)
    if dual is not None and advantage < 0 and value < dual * advantage:
        value, slope = dual * advantage, 0.0
    return value, slope


def tokens_of(batch):
    """Fields of ``batch`` in float64, (row, column) of its generated tokens, and of those outside the region."""
    rows = {key: value.double().numpy() for key, value in batch.items()}
    generated = [at for at in np.ndindex(ROWS, WIDTH) if rows["mask"][at]]
    deltas = {at: rows["current"][at] - rows["behaviour"][at] for at in generated}
    moved = {at: delta for at, delta in deltas.items() if delta * rows["advantages"][at] > 0}
    return rows, generated, {at for at, delta in moved.items() if not 1 - LOW <= math.exp(delta) <= 1 + HIGH}


def masked_shares(rows, generated, outside):
    """What is logged of the tokens ``outside``, by the end of its name."""
    ages = [VERSION - rows["versions"][at] for at in outside]
    counts = {
        "": len(outside),
        "_negative": sum(rows["advantages"][at] < 0 for at in outside),
        "_age_0": ages.count(0),
        "_age_2_plus": sum(age >= 2 for age in ages),
    }
    return {key: count / len(generated) for key, count in counts.items()}


def reference(batch, *, regional, from_update, agg, dual):
    """Loss, gradient [ROWS, WIDTH] and shares of masked tokens, token by token in float64."""
    rows, generated, outside = tokens_of(batch)
    total, gradient = 0.0, np.zeros((ROWS, WIDTH))
    for at in generated:
        behaviour, current, proximal = (rows[key][at] for key in ("behaviour", "current", "proximal"))
        if from_update:
            proximal = current
        weight = 0.0 if regional and at in outside else min(math.exp(proximal - behaviour), CAP)
        value, slope = ppo_term(math.exp(current - proximal), rows["advantages"][at], dual)
        share = 1 / len(generated) if agg == "token-mean" else 1 / rows["mask"][at[0]].sum() / ROWS
        total -= share * weight * value
        gradient[at] -= share * weight * slope
    return total, gradient, masked_shares(rows, generated, outside) if regional else {}


@pytest.mark.parametrize("agg", AGG_MODES)
@pytest.mark.parametrize("from_update", [False, True])
@pytest.mark.parametrize("region", [None, REGION], ids=["no region", "region"])
def test_loss_and_gradient_are_those_of_the_formula(region, from_update, agg):
    masked, kept = Counter(), 0
    for seed in range(4):
        batch, dual = build_batch(seed, updates=1 + seed % 2), (None, 1.1)[seed // 2]
        expected, slopes, shares = reference(
            batch, regional=region is not None, from_update=from_update, agg=agg, dual=dual
        )
        value, gradient, metrics = run(batch, region, from_update=from_update, agg=agg, dual=dual)
        # verl's seq-mean-token-mean adds 1e-8 to each length.
        assert value == pytest.approx(expected, abs=1e-7)
        np.testing.assert_allclose(gradient.numpy(), slopes, atol=1e-7)
        found = {key.removeprefix(MASKED): share for key, share in metrics.items() if key.startswith(MASKED)}
        assert found == pytest.approx(shares)
        masked.update(shares)
        kept += int((gradient != 0).sum())
    assert kept >= 4 and (region is None or (all(masked.values()) and masked["_negative"] < masked[""]))


def test_it_never_trains_without_weights():
    data = micro_batch(build_batch(0))
    del data["rollout_is_weights"]
    with pytest.raises(RuntimeError, match="rollout_is_weights"):
        run(build_batch(0), data=data)


@pytest.mark.parametrize("granularity", ["geometric", "sequence", None])
def test_one_update_trains_as_after_a_pass_over_the_batch(granularity):
    """The pass gives the log-probs from which the update starts: value and gradient are the same without it."""
    batch = build_batch(3)
    value, gradient, metrics = run(batch, from_update=True, granularity=granularity)
    after = {**batch, "proximal": batch["current"]}
    data = micro_batch(after, granularity=granularity or "token")
    if granularity is None:
        del data["rollout_is_weights"]
    expected, slopes, _ = run(after, function=ppo_loss, data=data)
    assert value == expected and torch.equal(gradient, slopes) and gradient.any()
    weights = (
        granularity and agg_loss(weights_of(batch, batch["current"], granularity), batch["mask"], "token-mean").item()
    )
    assert metrics.get(f"{OURS}rollout_corr/rollout_is_mean") == (granularity and pytest.approx(weights))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("from_update", [False, True])
@pytest.mark.parametrize(
    ("loss_mode", "granularity", "agg"),
    [
        ("vanilla", "token", "token-mean"),
        ("gpg", "token", "token-mean"),
        ("sapo", "token", "seq-mean-token-mean"),
        ("gspo", "geometric", "seq-mean-token-mean"),
    ],
)
def test_micro_batches_of_any_size_add_up_to_the_batch(loss_mode, granularity, agg, from_update, size):
    batch, region = build_batch(5), None if granularity == "geometric" else REGION
    how = {"loss_mode": loss_mode, "granularity": granularity, "agg": agg, "from_update": from_update}
    value, gradient, found = run(batch, region, size=size, **how)
    expected, slopes, metrics = run(batch, region, **how)
    assert value == pytest.approx(expected) and slopes.any(1).sum() >= ROWS // 2
    torch.testing.assert_close(gradient, slopes)
    assert found == pytest.approx(metrics | {key: found[key] for key in metrics if OURS not in key})


# -- what is reported --------------------------------------------------------------------------------------------------


def test_loss_reports_divergence_the_gap_of_kept_kv_and_proximal_error():
    batch = build_batch(5)
    behaviour, current, mask = batch["behaviour"], batch["current"], batch["mask"]
    # Of responses that began under an older version, the newest tokens.
    batch["versions"] = torch.where(batch["response"] > 0, 2, -1)
    batch["versions"][:, 0] = 0
    metrics = run(batch, from_update=True, version=2)[2]
    theirs = compute_offpolicy_metrics(current, behaviour, mask)
    assert {name: metrics[f"{OURS}rollout_corr/{name}"] for name in ("kl", "k3_kl")} == pytest.approx(
        {name: theirs[name] for name in ("kl", "k3_kl")}, rel=1e-4
    )
    newest = (batch["versions"] == 2) & (mask > 0)
    for start, how in ((current, {"from_update": True}), (batch["proximal"], {})):
        figures = run(batch, version=2, **how)[2]
        gap = figures[f"{OURS}kv_gap"] / figures[f"{OURS}kv_gap_share"]
        assert newest.sum() > 4 and gap == pytest.approx((start - behaviour).abs()[newest].mean().item())
    moved = (current - batch["proximal"]).abs()[mask > 0].mean().item()
    error = f"{OURS}partial_rollout/proximal/error"
    checked = run(batch, from_update=True, version=2, check_every=1)[2]
    assert checked[error] == pytest.approx(moved) and error not in metrics
    assert not any("rollout_corr" in key for key in checked), "verl logs its own"


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-sum"])
def test_loss_with_an_entropy_bonus_reports_verls_entropy(agg):
    batch = build_batch(5)
    verls = agg_loss(batch["current"].square(), batch["mask"], agg, global_batch_size=ROWS)
    assert run(batch, from_update=True, agg=agg, entropy=True)[2][f"{OURS}actor/entropy"] == pytest.approx(verls.item())


# -- every policy loss ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_mode", TOKEN_LOSSES)
def test_masked_token_loses_its_gradient_and_the_others_keep_theirs(loss_mode):
    batch = build_batch(1)
    outside = torch.zeros(ROWS, WIDTH, dtype=torch.bool)
    for at in tokens_of(batch)[2]:
        outside[at] = True
    plain = run(batch, loss_mode=loss_mode)[1]
    regional = run(batch, REGION, loss_mode=loss_mode)[1]
    assert outside.any() and plain[outside].any() and regional.any()
    assert torch.equal(regional, plain.masked_fill(outside, 0))


@pytest.mark.parametrize("loss_mode", ["gspo", "geo_mean"])
def test_sequence_is_in_or_out_as_a_whole_with_one_ratio_a_sequence(loss_mode):
    batch = build_batch(1)
    tokens = batch["mask"].sum(1).clamp(min=1)
    means = ((batch["current"] - batch["behaviour"]) * batch["mask"]).sum(1) / tokens
    out = (means * batch["advantages"][:, 0] > 0) & ((means.exp() > 1.1) | (means.exp() < 0.9)) & (batch["mask"].any(1))
    region = BehaviourRegion(0.1, 0.1, per_sequence=True)
    plain = run(batch, loss_mode=loss_mode, granularity="geometric")[1]
    regional = run(batch, region, loss_mode=loss_mode, granularity="geometric")[1]
    assert out.any() and plain[out].any() and plain[~out].any()
    # geo_mean adds 1e-10 to a weight before it takes its logarithm.
    torch.testing.assert_close(regional, plain * ~out[:, None], atol=1e-9, rtol=0)


@pytest.mark.parametrize("from_update", [False, True])
@pytest.mark.parametrize("masked", ["by the region", "samples", "samples, with a region", "weights"])
def test_batch_that_is_all_masked_has_no_gradient_and_finite_metrics(masked, from_update):
    batch, region, cap = build_batch(2, updates=1), None, CAP
    if masked == "by the region":
        batch["behaviour"] = batch["current"] - 2.0 * batch["advantages"].sign()
        region = BehaviourRegion(1e-3, 1e-3, per_sequence=False)
    if masked == "weights":
        batch["behaviour"], cap = batch["behaviour"] - 9.0, "1e-9_1.0"
    data = micro_batch(batch, from_update=from_update)
    if masked == "weights" and not from_update:
        data["rollout_is_weights"] = torch.zeros_like(data["rollout_is_weights"])
    if masked.startswith("samples"):
        region = REGION if "region" in masked else None
        data["response_mask"] = torch.zeros_like(data["response_mask"])
        tu.assign_non_tensor(data, batch_num_tokens=0)
    value, gradient, metrics = run(batch, region, data=data, from_update=from_update, cap=cap)
    assert value == 0 and not gradient.any() and np.isfinite(list(metrics.values())).all()
    assert masked != "by the region" or metrics[MASKED] == pytest.approx(1.0)


# -- which region, and where ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "mode", "wanted"),
    [
        ("trust_region=none", "vanilla", None),
        ("trust_region=mask", "vanilla", (0.2, 0.28, False)),
        ("trust_region=mask trust_region_bounds=[0.5,3]", "vanilla", (0.5, 3.0, False)),
        ("trust_region=mask", "gspo", (0.2, 0.28, True)),
        ("trust_region=auto", "sapo", (0.2, 0.28, False)),
        ("trust_region=auto", "gspo", None),
        ("trust_region=auto", "dppo_tv", None),
        ("trust_region=auto", "dppo_kl", None),
        ("trust_region=mask trust_region_bounds=[0.5,3]", "dppo_tv", (0.5, 3.0, False)),
        ("trust_region=auto correction=none", "vanilla", None),
    ],
)
def test_bounds_are_the_losss_own_unless_they_are_set(composed_config, settings, mode, wanted):
    """``auto`` masks where a token has a ratio of its own that the clip bounds, and is corrected."""
    config = composed_config("quickstart_cpu", *(f"partial_rollout.{setting}" for setting in settings.split()))
    actor = config.actor_rollout_ref.actor
    actor.policy_loss.loss_mode, actor.clip_ratio_low, actor.clip_ratio_high = mode, None, 0.28
    found = BehaviourRegion.of(PartialRolloutConfig.from_config(config), actor)
    assert found == (wanted and BehaviourRegion(*wanted))


def test_pickled_loss_has_its_region_and_no_dual_clip_where_it_is_null(composed_config):
    config = composed_config("quickstart_cpu", "actor_rollout_ref.actor.clip_ratio_c=null")
    settings, actor = PartialRolloutConfig.from_config(config), config.actor_rollout_ref.actor
    policy = ProximalPolicy.of(config, settings)
    got = pickle.loads(pickle.dumps(loss.worker_loss(actor, settings, policy))).keywords
    assert (got["policy"], got["region"]) == (policy, BehaviourRegion.of(settings, actor)) and got["region"]
    assert got["config"].clip_ratio_c == loss.NO_DUAL_CLIP


# -- behaviour weights: token and sequence granularity are verl's own --------------------------------------------------


def log_ratios(spread=0.4):
    generator = np.random.default_rng(0)
    log_ratio = torch.tensor(generator.normal(0.0, spread, (5, 12)), dtype=torch.float32)
    mask = torch.tensor(generator.integers(0, 2, (5, 12)), dtype=torch.int64)
    mask[:, 0] = 1
    return log_ratio, mask


def test_geometric_weights_are_capped_masked_and_normalised_as_verls():
    log_ratio, mask = log_ratios()
    mask[2], mask[3, 1:] = 0, 0
    expected = np.zeros(log_ratio.shape)
    for row, (ratios, generated) in enumerate(zip(log_ratio.double().numpy(), mask.numpy().astype(bool), strict=True)):
        expected[row, generated] = math.prod(map(math.exp, ratios[generated])) ** (1 / max(generated.sum(), 1))
    capped, within = np.minimum(expected, 1.1), np.where((expected >= 0.9) & (expected <= 1.1), expected, 0.0)
    normalised = expected / expected[mask.any(1)].max(1).mean()
    for wanted, threshold, normalise in ((capped, 1.1, False), (within, "0.9_1.1", False), (normalised, 9.0, True)):
        weights, metrics = compute_rollout_correction_weights(
            log_ratio, mask, "geometric", threshold, rollout_is_batch_normalize=normalise
        )
        np.testing.assert_allclose(weights.numpy(), wanted, rtol=2e-5)
        if threshold == 1.1:
            kept = wanted[mask.bool()]
            assert metrics["rollout_is_mean"] == pytest.approx(kept.mean(), rel=1e-5)
            ess = kept.mean() ** 2 / np.square(kept).mean()
            assert metrics["rollout_is_eff_sample_size"] == pytest.approx(ess, rel=1e-5)


@pytest.mark.parametrize("granularity", ["token", "geometric", "sequence"])
def test_batch_whose_weights_are_all_masked_has_no_effective_sample(granularity):
    log_ratio, mask = log_ratios(spread=0.01)
    weights, metrics = compute_rollout_correction_weights(log_ratio - 2.0, mask, granularity, "0.9_1.1")
    assert not weights.any() and metrics["rollout_is_eff_sample_size"] == 0
    assert metrics["rollout_is_mean"] == pytest.approx(0, abs=1e-9) and metrics["rollout_is_oob_ratio"] == 1
    assert all(map(math.isfinite, metrics.values()))
