"""Several rows of a sample, as an agent loop's list of outputs: under PR and noPR the same as under verl's v1."""

import asyncio
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.protocol import DataProto
from verl.trainer.ppo import core_algos, padding_utils

from recipe.partial_rollout.manager.policies import common_value
from recipe.partial_rollout.manager.types import TakenGroup
from recipe.partial_rollout.preflight.learning_rules import NOT_UNDER_V1
from recipe.partial_rollout.records.run_log import TrainedGroup
from recipe.partial_rollout.training.agent_loop_manager import assemble_batch
from recipe.partial_rollout.worker.rewards import REWARD_INFO
from tests.unit import test_failing_samples as verls_path
from tests.unit.loop_life import output_of
from tests.unit.test_turn_alignment import P, log_probs_of, played

pytest.importorskip("transfer_queue")
from verl.trainer.ppo.v1 import agent_loop_tq, trainer_base

from recipe.partial_rollout.training.v1 import rounds
from recipe.partial_rollout.training.v1.trainer import PartialRolloutPPOTrainer
from recipe.partial_rollout.worker.agent_loop_worker import sample_output

WIDTH = 5


class Queue:
    """TransferQueue, in this process: a dictionary of fields a key."""

    def __init__(self):
        self.held, self.tags = {}, {}

    def kv_batch_put(self, keys, partition_id, fields, tags=None):
        for i, key in enumerate(keys):
            self.held.setdefault(key, {}).update({name: fields[name][i] for name in fields.keys()})  # noqa: SIM118
        self.tags |= dict(zip(keys, tags or (), strict=False))

    async def async_kv_batch_put(self, **given):
        self.kv_batch_put(**given)

    def kv_batch_get(self, keys, partition_id):
        return [self.held[key] for key in keys]


# -- what verl's v1 makes of the same outputs --------------------------------------------------------------------------

OUTPUTS = ((P, [5, 6]), ([4, 9], [7, 8, 9]), ([4], [3]))
"""of a loop that has rewritten its context twice: prompt and response"""


def outputs():
    return [
        output_of(prompt, response, response_logprobs=log_probs_of(response, 2), extra_fields={"own": len(response)})
        for prompt, response in OUTPUTS
    ]


def scored(**options):
    """verl's worker without its own set-up, and what its reward function has been given."""
    worker, given = verls_path.worker(None, handles=None, **options), []

    async def remote(data):
        given.append(data)
        return {"reward_score": 0.5, "reward_extra_info": {"acc": float(data.batch["responses"][-1, 0])}}

    worker.reward_loop_worker_handles = [SimpleNamespace(compute_score=SimpleNamespace(remote=remote))]
    return worker, given


@pytest.mark.parametrize("own_score", [None, 0.25])
def test_rows_and_rewards_are_those_that_verls_v1_makes(own_score):
    made = outputs()
    made[-1].reward_score = own_score
    if own_score is not None:
        # verl's worker reads it unasked.
        made[-1].extra_fields[REWARD_INFO] = {"acc": 7.0}
    queue, row = Queue(), {"uid": "u", "session_id": 1, "global_steps": 3, "data_source": "t"}
    tq_worker = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    verls, theirs = scored()
    with patch.object(agent_loop_tq, "tq", queue):
        copies = [each.model_copy(deep=True) for each in made]
        asyncio.run(tq_worker._agent_loop_postprocess(verls, copies, False, **row))
    worker, our = scored(use_v1=True)
    asyncio.run(worker._score(made, {"uid": "u", "data_source": "t"}))
    assert len(theirs) == len(our) == (own_score is None)
    for their_call, our_call in zip(theirs, our, strict=True):
        assert all(torch.equal(value, our_call.batch[key]) for key, value in their_call.batch.items())
        assert their_call.non_tensor_batch.keys() - our_call.non_tensor_batch.keys() == {"session_id", "global_steps"}
    sample = played(*((prompt, 2, response) for prompt, response in OUTPUTS))
    for each in made:
        each.extra_fields.pop("raw_prompt")
    output = sample_output(sample, made)
    batch = assemble_batch([TakenGroup("0/0", 0, {"data_source": "t"}, (output,))], ["u"], 4, WIDTH, 0)
    for row, (key, expected) in zip(rounds.rows_of(batch), queue.held.items(), strict=True):
        assert key.startswith("u_1_")
        for name in ("prompts", "responses", "response_mask", "rm_scores", "input_ids", "position_ids", "loss_mask"):
            assert row[name].tolist() == expected[name].tolist(), name
        assert row["rollout_log_probs"].tolist() == pytest.approx(expected["rollout_log_probs"].tolist())
        said = getattr(expected["extra_fields"], "data", expected["extra_fields"])
        assert row["extra_fields"]["acc"] == said[REWARD_INFO]["acc"]
        assert row["extra_fields"]["own"] == said["own"]
        assert row["extra_fields"].get("raw_prompt") is None


# -- noPR ----------------------------------------------------------------------------------------------------------------


class Several(verls_path.Loop):
    """As many rows as the row's length says, of one token more each."""

    async def run(self, sampling_params, **row):
        return [
            output_of([1, 2], [65] * (i + 1), response_logprobs=[-0.5] * (i + 1), extra_fields={"place": i})
            for i in range(row["length"])
        ]


def test_nopr_trains_all_rows_and_validates_the_last():
    score = verls_path.flaky()

    def generated(**how):
        with patch.object(verls_path, "Loop", Several):
            return verls_path.generated(score, verls_path.rows(1, 3, 2, 1), chunks=2, use_v1=True, **how)

    batch = generated()
    assert batch.batch["response_mask"].sum(dim=1).tolist() == [1, 1, 2, 3, 1, 2, 1]
    assert batch.non_tensor_batch["__row__"].tolist() == [0, 0, 1, 2, 0, 1, 0]
    assert batch.non_tensor_batch["place"].tolist() == [0, 0, 1, 2, 0, 1, 0]
    assert batch.batch["rm_scores"].sum(dim=1).tolist() == [1.0] * 7
    validated = generated(validate=True)
    assert validated.batch["response_mask"].sum(dim=1).tolist() == [1, 3, 2, 1]


# -- the batch -----------------------------------------------------------------------------------------------------------


def sample_of(*lengths, score=1.0):
    """A finished sample with a row of each of ``lengths``."""
    turns = [([1 + i], 2, list(range(5, 5 + length))) for i, length in enumerate(lengths)]
    made = [output_of(prompt, tokens) for prompt, _, tokens in turns]
    made[-1].reward_score = score
    return sample_output(played(*turns), made)


@pytest.fixture
def put(monkeypatch):
    """The batch of a round in which ``groups`` are trained, as verl's v1 trainer gets it, and the queue that holds it."""

    def put(groups):
        queue = Queue()
        for module in (rounds, padding_utils):
            monkeypatch.setattr(module, "tq", queue)

        def generate_sequences(prompts):
            uids = prompts.non_tensor_batch["uid"][:: len(groups[0].outputs)]
            return assemble_batch(groups, uids, 4, WIDTH, 0)

        loader = [{"slot": torch.arange(len(groups)).unsqueeze(1)}]
        buffer = rounds.RoundBuffer(SimpleNamespace(generate_sequences=generate_sequences), loader, 2)
        batch, _ = buffer.sample(3, "train", len(groups))
        return batch, queue

    return put


def test_keys_name_sample_and_row(put):
    samples = [sample_of(2), sample_of(1, 2, 3), sample_of(3, 1), sample_of(4)]
    groups = [TakenGroup(f"0/{i}", i, {"data_source": f"d{i}"}, tuple(samples[2 * i : 2 * i + 2])) for i in range(2)]
    batch, queue = put(groups)
    first, second = dict.fromkeys(key.split("_")[0] for key in batch.keys)
    assert batch.keys == [
        *(f"{first}_{name}" for name in ("0_0", "1_0", "1_1", "1_2")),
        *(f"{second}_{name}" for name in ("0_0", "0_1", "1_0")),
    ]
    assert [len(queue.held[key]["responses"]) for key in batch.keys] == [2, 1, 2, 3, 3, 1, 4]
    assert [queue.tags[key]["response_len"] for key in batch.keys] == [2, 1, 2, 3, 3, 1, 4]
    record = TrainedGroup.of(groups[0], 2)
    assert (record.lengths, record.tokens, record.staleness) == ([2, 6], 8, [0, 0])


def test_dynamic_sampling_compares_samples_whatever_their_rows():
    alike = sample_of(2, 3, score=0.5), sample_of(1, score=0.5)
    assert common_value("seq_reward", alike) == 0.5
    assert common_value("seq_reward", (*alike, sample_of(1, 1, 1))) is None


def test_verls_filler_rows_have_versions_of_their_own_length(put):
    batch, queue = put([TakenGroup("0/0", 0, {"data_source": "t"}, (sample_of(2, 3), sample_of(1)))])
    batch = padding_utils.upsample_batch_to_divisible_size(batch, 4, 1)
    rounds.give_versions(batch)
    assert len(batch) == 4
    filler = queue.held[batch.keys[-1]]
    fields = ("response_mask", "rollout_log_probs", "rollout_versions", "rm_scores", "responses")
    assert [len(filler[name]) for name in fields] == [1] * 5
    assert filler["rollout_versions"].tolist() == [-1] and not filler["response_mask"].any()


# -- advantages ----------------------------------------------------------------------------------------------------------


def batch_of(counts, seed, groups=4):
    """A random batch of samples with ``counts`` rows each, in groups; keys, sample and place of each row; scores."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(sum(counts), WIDTH, generator=generator) < 0.7).long()
    mask[:, 0] = 1
    owners = np.repeat(np.arange(len(counts)), counts)
    scores = torch.rand(len(counts), generator=generator, dtype=torch.float64)
    rewards = torch.zeros(mask.shape)
    last = WIDTH - 1 - mask.flip(1).argmax(dim=1)
    rewards[torch.arange(len(mask)), last] = scores[owners].float()
    places = np.concatenate([np.arange(count) for count in counts])
    keys = [f"u{owner // groups}_{owner % groups}_{place}" for owner, place in zip(owners, places, strict=True)]
    data = DataProto.from_single_dict(
        {"response_mask": mask, "token_level_rewards": rewards, "token_level_scores": rewards.clone()}
    )
    data.non_tensor_batch["uid"] = np.array([f"u{owner // groups}" for owner in owners], dtype=object)
    return data, keys, owners, places, scores


COUNTS = (1, 3, 1, 1, 2, 2, 1, 4, 1, 1, 1, 1)


@pytest.fixture
def config(resolved_config):
    return resolved_config("quickstart_cpu").algorithm


def advantages(data, keys, name, config):
    """As the trainer computes them."""
    how = {"num_repeat": 4, "norm_adv_by_std_in_grpo": True, "config": config}
    return trainer_base.compute_advantage_for_multi_trajectories(data, keys, name, **how).batch["advantages"]


def estimators():
    return [name.value for name in core_algos.AdvantageEstimator if name.value not in (*NOT_UNDER_V1, "gae")]


def reference(name, scores, lengths, mask):
    """The advantage of each token, in float64, of groups of four samples with ``scores`` [S] and ``lengths`` [S].

    ``mask`` [S, K]: their tokens, for estimators that whiten.
    """
    groups, lengths = scores.reshape(-1, 4), lengths.reshape(-1, 4).double()
    mean, deviation = groups.mean(1, keepdim=True), groups.std(1, keepdim=True) + 1e-6
    first, second = groups.topk(2, dim=1).values.split(1, dim=1)
    own = {
        "grpo": (groups - mean) / deviation,
        "rloo": groups - (groups.sum(1, keepdim=True) - groups) / 3,
        "opo": groups - (lengths * groups).sum(1, keepdim=True) / lengths.sum(1, keepdim=True),
        "grpo_passk": torch.where(groups == first, (first - second) / deviation, 0.0),
        "gpg": groups - mean,
        "reinforce_plus_plus": groups,
        "reinforce_plus_plus_baseline": groups - mean,
    }[name.removesuffix("_vectorized")]
    tokens = own.reshape(-1, 1) * mask
    if name.startswith("reinforce"):
        trained = tokens[mask.bool()]
        tokens = (tokens - trained.mean()) / trained.std() * mask
    return tokens


@pytest.mark.parametrize("emptied", [None, 2, 3], ids=["every row trains", "not the middle one", "not the last one"])
@pytest.mark.parametrize("name", estimators())
def test_estimator_compares_samples_and_rows_share_their_advantage(name, config, emptied):
    """As in float64, wherever the rows of a sample are in the batch. Rows 1 to 3 are those of one sample."""
    data, keys, owners, places, scores = batch_of(COUNTS, 4)
    if emptied is not None:
        data.batch["response_mask"][emptied] = 0
    order = np.random.default_rng(0).permutation(len(keys))
    found = advantages(data.select_idxs(order), [keys[i] for i in order], name, config)
    mask = torch.zeros(len(COUNTS), max(COUNTS), WIDTH, dtype=torch.float64)
    mask[owners, places] = data.batch["response_mask"].double()
    expected = reference(name, scores, mask.sum((1, 2)), mask.flatten(1))
    expected = expected.unflatten(1, (-1, WIDTH))[owners, places]
    assert torch.allclose(found.double(), expected[order], atol=1e-5)


def test_masked_sample_has_no_vote_and_filler_rows_change_nothing(config):
    """A whole sample that failed, and verl's fillers, which have a prompt of their own."""
    data, keys, owners, _, _ = batch_of((1, 3, 2, 1), 6)
    data.batch["response_mask"][owners == 2] = 0
    left = data.select_idxs(np.flatnonzero(owners != 2))
    kept = [key for key, owner in zip(keys, owners, strict=True) if owner != 2]
    expected = advantages(left, kept, "rloo", config)
    fillers = DataProto.from_single_dict(
        {key: torch.zeros(2, WIDTH, dtype=value.dtype) for key, value in data.batch.items()}
    )
    fillers.non_tensor_batch["uid"] = np.array(["pad"] * 2, dtype=object)
    both = DataProto.concat([data, fillers])
    found = advantages(both, [*keys, "pad_0_0", "pad_1_0"], "rloo", config)
    assert torch.allclose(found[: len(keys)][owners != 2], expected)
    assert not found[len(keys) :].any() and not found[: len(keys)][owners == 2].any()


def test_kl_penalty_of_every_row_counts_and_the_score_once(config):
    data, keys, owners, _, scores = batch_of((2, 1, 1, 1), 7)
    penalty = 0.1 * data.batch["response_mask"]
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - penalty
    found = advantages(data, keys, "rloo", config)
    totals = scores.index_add(0, torch.from_numpy(owners), penalty.sum(1).double(), alpha=-1)
    expected = reference("rloo", totals, totals, torch.ones(4, 1))[owners] * data.batch["response_mask"]
    assert torch.allclose(found.double(), expected, atol=1e-5)


# -- ranks and updates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mini", "critic", "dp", "n", "rows", "filled", "minis"),
    [
        (4, None, 1, 2, 8, 8, (8,)),
        (4, None, 1, 2, 11, 12, (12,)),
        (2, None, 1, 2, 11, 12, (6,)),
        (4, None, 8, 2, 11, 16, (16,)),
        (2, 1, 2, 2, 17, 24, (12, 6)),
    ],
)
def test_step_has_as_many_updates_whatever_its_rows(mini, critic, dp, n, rows, filled, minis):
    trainer = object.__new__(PartialRolloutPPOTrainer)
    actor = {"ppo_mini_batch_size": mini, "use_dynamic_bsz": True}
    trainer.config = OmegaConf.create(
        {
            "data": {"train_batch_size": 4},
            "actor_rollout_ref": {"actor": actor, "rollout": {"n": n}},
            "critic": {"ppo_mini_batch_size": critic},
        }
    )
    trainer.use_critic = critic is not None
    multiple = trainer._get_required_batch_multiple(dp)
    size = -(-rows // multiple) * multiple
    assert size == filled
    for part, expected in zip(trainer._updated, minis, strict=True):
        before = part.ppo_mini_batch_size
        with trainer._as_many_updates(part, [0] * size):
            assert part.ppo_mini_batch_size * n == expected and expected % dp == 0
        assert part.ppo_mini_batch_size == before
