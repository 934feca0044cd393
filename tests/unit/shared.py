"""What several test files say alike."""

import asyncio
import contextlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from recipe.partial_rollout.config.settings import Deadlines, FailureLimits, PartialRolloutConfig
from recipe.partial_rollout.manager.codec import capture, encode
from recipe.partial_rollout.manager.types import Lease, SampleOutput
from recipe.partial_rollout.preflight import check_settings
from recipe.partial_rollout.preflight.inputs import missing_inputs, missing_packages, size_bucket


def check_config(config):
    """Check everything of ``config`` but the rows of its data, without asking for a device or for Ray."""
    settings = check_settings(config)
    for error in (*missing_packages(config), *missing_inputs(config)):
        raise error
    size_bucket(config)
    return settings


def settings_of(batch=1, n=1, *, stall_s=30.0, parked_s=None, failures=FailureLimits(), **keys):  # noqa: B008 - frozen
    """The settings for ``batch`` groups of ``n`` samples a step; ``parked_s``: deadline of a tool and of the reward."""
    failures = replace(failures, tool_timeout_s=parked_s, sample_timeout_s=None)
    deadlines = Deadlines(stall_s=stall_s, reward_s=parked_s or 300.0)
    return PartialRolloutConfig(batch_groups=batch, samples_per_group=n, failures=failures, deadlines=deadlines, **keys)


class InProcess:
    """An output store without Ray."""

    put = staticmethod(tuple)
    fetch = staticmethod(dict)


def state_of(manager):
    """What a checkpoint would hold of a ``PromptsManager`` that keeps its outputs itself."""
    return encode(capture(manager), dict)


def tokens_in(manager):
    """Response tokens of all samples that ``manager`` has."""
    return sum(group.length for group in manager.groups.by_order.values())


class Local:
    """An actor handle without Ray; ``broken`` verbs raise instead."""

    def __init__(self, actor):
        self.actor = actor
        self.broken = {}

    def __getattr__(self, verb):
        async def call(*arguments):
            if verb in self.broken:
                raise self.broken[verb]
            answer = await getattr(self.actor, verb)(*arguments)
            if verb in self.broken:
                # It died while it asked.
                raise self.broken[verb]
            return answer

        return SimpleNamespace(remote=lambda *arguments: asyncio.ensure_future(call(*arguments)))


class Claims:
    """A claim loop that leases slots at once; has what samples have reported."""

    def __init__(self):
        self.segments = []

    @contextlib.asynccontextmanager
    async def engine_call(self, sample):
        yield

    def release_slot(self, sample):
        self.segments += sample.unsent
        sample.unsent = []


def live_sample(segments=(), *, id="0/0#0", order=0):
    """A sample that is granted to its worker with these segments of its first turn."""
    from recipe.partial_rollout.worker.live_sample import LiveSample, SampleClock

    lease = Lease(id, id.partition("#")[0], order, {}, tuple(segments))
    return LiveSample(lease, SampleClock(f"sample {id}"))


async def hangs(*_, **__):
    await asyncio.sleep(60)


def script_replicas(patch, generate):
    """``generate`` answers in place of verl's client and its replicas, of which there is one: ``replica-7``.

    As with Ray, a request runs on in its replica when its caller is cancelled.
    """
    from verl.workers.rollout.llm_server import LLMServerClient

    from recipe.partial_rollout.worker.llm_client import PartialRolloutLLMClient, ReplicaChoice

    async def asked(self, request_id, **request):
        server, _ = await self._acquire_server(request_id)
        self._vllm_request_id(request_id)
        task = asyncio.ensure_future(generate(request_id, **request))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            return await asyncio.shield(task)
        finally:
            self._release_server(server, request_id)

    patch.setattr(LLMServerClient, "generate", asked)
    patch.setattr(PartialRolloutLLMClient, "replicas", ReplicaChoice({"replica-7": None}), raising=False)


def tool_schema(name):
    """verl's, of a tool without parameters."""
    from verl.tools.schemas import OpenAIFunctionToolSchema

    parameters = {"type": "object", "properties": {}, "required": []}
    function = {"name": name, "description": name, "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


def begin(manager):
    """The version after the last batch; returns how many groups were admitted."""
    before = manager.counters.admitted_groups
    manager.begin_version(manager.version + manager.batch_taken)
    return manager.counters.admitted_groups - before


def output_of(segments, reward=0.0):
    """The output of a sample: what its engine calls made, then a token that the mask leaves out for each turn but one."""
    generated = np.concatenate([s.token_ids for s in segments] or [np.empty(0, np.int32)])
    count = len(generated)
    log_probs = [s.log_probs for s in segments]
    versions = [np.full(len(s), s.version, np.int32) for s in segments]
    outside = np.zeros(len({s.turn for s in segments} - {0}), np.int32)
    return SampleOutput(
        prompt_ids=np.ones(1, np.int32),
        response_ids=np.concatenate([generated, outside]),
        response_mask=np.concatenate([np.ones(count), outside]).astype(np.int8),
        log_probs=np.concatenate([*log_probs, outside.astype(np.float32)]),
        versions=np.concatenate([*versions, outside - 1]),
        segments=len(segments),
        reward_score=reward,
        reward_extra_info={},
        num_turns=2,
        metrics={},
    )


def damaged(data, flips):
    """``data`` cut off at each byte, and with each of ``flips`` in each byte."""
    yield from (data[:length] for length in range(len(data)))
    for offset, byte in enumerate(data):
        yield from (data[:offset] + bytes([byte ^ flip]) + data[offset + 1 :] for flip in flips)


def byte_tokenizer(template, *tokens, **special):
    """A token a byte and each of ``tokens``; ``special`` are named by their role."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(letters, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_tokens([AddedToken(name, normalized=False) for name in tokens])
    made = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    made.chat_template = template
    return made


def converse(config, tokenizer, question, answer):
    """What verl's tool loop with the config's tools makes of ``question``; ``answer`` gets the ids so far."""
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.tools.tool_registry import load_all_tools
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.workers.rollout.replica import TokenOutput

    async def generate(request_id, prompt_ids, **_):
        ids = answer(prompt_ids)
        return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids))

    async def run():
        tools = load_all_tools(config.actor_rollout_ref.rollout.multi_turn.tool_config_path, None)
        engine, options = SimpleNamespace(generate=generate), {"hf_model_type": "qwen3", "tools": ToolListWrap(tools)}
        data = DictConfigWrap(config.data)
        loop = ToolAgentLoop(DictConfigWrap(config), engine, tokenizer, None, RLHFDataset, data, **options)
        return await loop.run({}, raw_prompt=[{"role": "user", "content": question}])

    return asyncio.run(run())
