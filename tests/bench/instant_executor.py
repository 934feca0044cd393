"""vLLM's executor whose steps cost next to nothing: an engine that is quicker than its front end.

Token and log-prob follow from the first token of the prompt and the position, so what arrives can be checked exactly.
"""

import numpy as np
import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput

FIRST, TOKENS = 10, 97
VOCABULARY = 128


def token_at(first, position):
    """The token at ``position`` (an int or an array) of a sequence that begins with ``first``."""
    return FIRST + (first + 7 * position) % TOKENS


def log_prob_at(position):
    return -position / 1000


def engine_args(directory, **own):
    """Arguments of an engine on this executor; ``directory`` gets the config of its model."""
    from transformers import Qwen3Config
    from vllm.engine.arg_utils import AsyncEngineArgs

    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    ).save_pretrained(directory)
    return AsyncEngineArgs(
        model=str(directory),
        dtype="float32",
        skip_tokenizer_init=True,
        scheduling_policy="priority",
        worker_cls="auto",
        distributed_executor_backend=f"{__name__}.InstantExecutor",
        **own,
    )


class InstantExecutor(Executor):
    """Of one device, without one."""

    supports_pp = False

    @classmethod
    def supports_async_scheduling(cls):
        return True

    def _init_executor(self):
        self._sequences, self._made = {}, None
        """[first token, tokens known], by request"""

    @property
    def max_concurrent_batches(self):
        return 2 if self.scheduler_config.async_scheduling else 1

    def check_health(self):
        pass

    def collective_rpc(self, method, *_, **__):
        answers = {
            "get_supported_tasks": ("generate",),
            "get_kv_cache_spec": self._kv_cache_spec(),
            "determine_available_memory": 2**24,
            # asked by releases after 0.28
            "get_supported_kv_cache_layouts": ["LBNHC"],
        }
        return [answers.get(method)]

    def _kv_cache_spec(self):
        size = self.cache_config.block_size
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=8, dtype=torch.float32)
        return {"model.layers.0.self_attn.attn": spec}

    def initialize_from_config(self, kv_cache_configs):
        pass

    def compile_or_warm_up_model(self):
        pass

    def execute_model(self, scheduler_output, non_block=False):
        made = self._output(scheduler_output) if scheduler_output.num_scheduled_tokens else None
        self._made = made
        return _future(None if made else EMPTY_MODEL_RUNNER_OUTPUT, non_block)

    def sample_tokens(self, grammar_output, non_block=False):
        return _future(self._made, non_block)

    def _output(self, plan):
        sequences, cached = self._sequences, plan.scheduled_cached_reqs
        for name in plan.finished_req_ids:
            sequences.pop(name, None)
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name in cached.req_ids:
            if name in cached.all_token_ids:
                sequences[name][1] = len(cached.all_token_ids[name])
        for new in plan.scheduled_new_reqs:
            # The protocol of model runner V2 tells a resumed request as a new one.
            known = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            sequences[new.req_id] = [known[0], len(known)]
            starts[new.req_id] = new.num_computed_tokens
        names = list(plan.num_scheduled_tokens)
        ends = [starts[name] + plan.num_scheduled_tokens[name] for name in names]
        whole = [end >= sequences[name][1] for name, end in zip(names, ends, strict=True)]
        for name, end, samples in zip(names, ends, whole, strict=True):
            sequences[name][1] += samples * (end + 1 - sequences[name][1])
        at = np.array(ends)
        ids = token_at(np.array([sequences[name][0] for name in names]), at)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[token] if samples else [] for token, samples in zip(ids.tolist(), whole, strict=True)],
            logprobs=LogprobsLists(ids[:, None], log_prob_at(at).astype(np.float32)[:, None], np.ones(len(names), int)),
        )


def _future(result, non_block):
    from concurrent.futures import Future

    if not non_block:
        return result
    future = Future()
    future.set_result(result)
    return future
