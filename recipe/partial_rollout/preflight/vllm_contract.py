"""A table of what the recipe and ``verl_ext`` take from vLLM, and the check of the installed release against it.

``config.releases`` says which releases run. On one that is not tested, the driver checks this table before Ray starts:
if a name is gone, the run ends in one line within seconds, where otherwise an engine would die minutes later. The check
takes three seconds once vLLM is imported. ``tests/unit/test_upstream_contract.py`` checks the tested releases. It also
compares this table, and a longer one for verl, with our sources.

An entry is a line ``owner <- by``: a module or ``module:Class``, and stems of our files that use it. Below, indented::

    has: attributes: class members, fields, or instance attributes that the class assigns
    calls: functions with what we pass: f(a, b, *, c) is two by position and one by name; upstream may require no more
    reads: config keys and environment variables that its source reads
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

from omegaconf import DictConfig

from recipe.partial_rollout.config import releases
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.preflight.rule import at
from recipe.partial_rollout.terminal import say
from recipe.partial_rollout.waits import one_line

NEEDED = """\
vllm.v1.engine.async_llm:AsyncLLM <- hold replica vllm_plugin
    has: output_processor engine_core vllm_config model_config errored dead_error
    calls: pause_generation(*, mode, clear_cache) check_health() reset_encoder_cache()
        add_request(request_id, prompt, params, *, lora_request, priority) abort(request_id, *, internal)
        generate(*, prompt, sampling_params, request_id, lora_request, priority)
        reset_prefix_cache(*, reset_running_requests, reset_connector)
vllm.v1.engine.output_processor:RequestOutputCollector <- replica
    has: request_id
    calls: get() get_nowait() close()
vllm.v1.engine.output_processor:OutputProcessor <- hold replica
    has: request_states
vllm.v1.engine.output_processor:RequestState <- hold replica
    has: detokenizer external_req_id
vllm.v1.engine.core_client:AsyncMPClient <- hold vllm_plugin
    has: outputs_queue engine_ranks_managed
    calls: call_utility_async(method) pause_scheduler_async(*, mode, clear_cache)
vllm.v1.engine:EngineCoreOutputs <- hold
    has: engine_index
vllm.config:VllmConfig <- replica
    has: cache_config parallel_config
vllm.config:ParallelConfig <- replica
    has: data_parallel_size
vllm.v1.engine.exceptions:EngineDeadError <- replica
vllm.outputs:RequestOutput <- replica
    has: finished outputs metrics
vllm.sampling_params:RequestOutputKind <- replica
    has: CUMULATIVE FINAL_ONLY
vllm.inputs:TokensPrompt <- replica distribution
    has: prompt_token_ids cache_salt
vllm:SamplingParams <- llm_client observed agent_loop_worker replica distribution
    has: temperature top_p top_k repetition_penalty logprobs n max_tokens detokenize stop min_tokens seed
        presence_penalty frequency_penalty bad_words thinking_token_budget structured_outputs repetition_detection
        skip_special_tokens spaces_between_special_tokens output_kind
vllm.v1.engine.detokenizer:IncrementalDetokenizer <- llm_client hold replica
    calls: num_output_tokens() from_new_request(tokenizer, request) update(new_token_ids, *, stop_terminated)
vllm.model_executor.layers.utils <- cpu
    calls: dispatch_cpu_unquantized_gemm(layer, remove_weight)
vllm.model_executor.layers.linear:UnquantizedLinearMethod <- cpu
    calls: process_weights_after_loading(layer)
vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod <- cpu
    calls: process_weights_after_loading(layer)
"""
"""names that every training needs: if one is gone, no training runs, or its log-probs may be wrong"""
OPTIONAL = """\
# log-probs as lists of numbers
vllm.logprobs <- replica
    has: FlatLogprobs
vllm.logprobs:FlatLogprobs <- replica
    has: start_indices logprobs
vllm.sampling_params:SamplingParams <- replica
    has: flat_logprobs
# KV headroom, and what the run prints of its engines
vllm.engine.arg_utils:AsyncEngineArgs <- replica
    has: watermark scheduler_cls
vllm.config:VllmConfig <- replica
    has: use_v2_model_runner
vllm.config:CacheConfig <- replica
    has: kv_cache_size_tokens
vllm.v1.metrics.stats:RequestStateStats <- replica
    has: queued_ts scheduled_ts
# the count of preemptions, and the report of them that 0.24 lacks
vllm.v1.core.sched.interface:PauseState <- vllm_plugin
    has: UNPAUSED
vllm.v1.engine.core:EngineCore <- vllm_plugin
    has: scheduler
vllm.v1.core.sched.scheduler:Scheduler <- vllm_plugin
    has: pause_state running
    calls: _preempt_request(request, timestamp) reset_prefix_cache(reset_running_requests, reset_connector) schedule()
vllm.v1.core.sched.output:SchedulerOutput <- vllm_plugin
    has: preempted_req_ids
# names of LoRA adapters
vllm.model_executor.models.utils <- vllm_plugin
    has: WeightsMapper
# tokens in pieces
vllm.v1.core.sched.scheduler:Scheduler <- piecewise_scheduler
    calls: update_from_output(scheduler_output, model_runner_output) has_finished_requests()
        finish_requests(request_ids, finished_status)
    has: pause_state __init__
vllm.v1.core.sched.async_scheduler:AsyncScheduler <- piecewise_scheduler
vllm.v1.core.sched.interface:PauseState <- piecewise_scheduler
    has: PAUSED_ALL
vllm.v1.engine:EngineCoreOutput <- piecewise_scheduler
    has: request_id new_token_ids new_logprobs finish_reason trace_headers
vllm.v1.engine:EngineCoreOutputs <- piecewise_scheduler
    has: outputs engine_index timestamp
vllm.v1.outputs:LogprobsLists <- piecewise_scheduler
vllm.v1.request:RequestStatus <- piecewise_scheduler
    has: FINISHED_ABORTED
"""
"""names of the features in the headings: a feature is left out if one of its names is gone. An untested release never
sends tokens in pieces."""
UPSTREAM = ("verl", "vllm")


class Uses(NamedTuple):
    """An entry of a table: a module or class of vLLM or verl, and what our files use of it (module docstring)."""

    owner: str
    by: list[str]
    has: list[str]
    calls: dict[str, str]
    reads: list[str]


def entries(table: str) -> Iterator[Uses]:
    """Yield the entries of ``table``. A line that begins with ``#`` is a heading, and is skipped."""
    for entry in re.split(r"\n(?=\S)", table.strip()):
        head, *rest = re.split(r" (has|calls|reads): ", " ".join(entry.split()))
        if not head.startswith("#"):
            owner, by = head.split(" <- ")
            used = {"has": "", "calls": "", "reads": "", **dict(zip(rest[::2], rest[1::2], strict=True))}
            calls = dict(re.findall(r"(\w+)\(([^)]*)\)", used["calls"]))
            yield Uses(owner, by.split(), used["has"].split(), calls, used["reads"].split())


def check_vllm(config: DictConfig) -> Iterator[ConfigError]:
    """Yield an error for the first name that an untested vLLM lacks, or print which features the run does without."""
    tolerance = releases.tolerance() if at(config, "rollout.name") == "vllm" else ""
    if not tolerance:
        return
    if first := next(lacks(entries(NEEDED)), None):
        remedy = f"install one of {', '.join(releases.TESTED)}"
        yield ConfigError(f"vLLM {releases.vllm()} lacks a name that the recipe needs: {first}; {remedy}")
    else:
        say(tolerance)


def lacks(table: Iterable[Uses]) -> Iterator[str]:
    """Yield a line for each name of ``table`` that upstream lacks or that cannot be imported."""
    for uses in table:
        for each in tried(lambda uses=uses: missing(uses)):
            yield f"{uses.owner} (used in {', '.join(uses.by)}): {each}"


def tried(look: Callable[[], list[str]]) -> list[str]:
    """Return what ``look`` returns; if it raises, a list of the error in one line."""
    try:
        return look()
    except Exception as error:
        return [one_line(error)]


# -- reading upstream ----------------------------------------------------------------------------------------------------


def missing(uses: Uses) -> list[str]:
    """List what upstream lacks of an entry."""
    owner = found(uses.owner)
    wrong = [f"{name} is gone" for name in uses.has if not has(owner, name)]
    for name, passed in uses.calls.items():
        function = getattr(owner, name, None)
        reason = "is gone" if function is None else refusal(function, passed)
        wrong += [f"{name} {reason}"] if reason else []
    source = inspect.getsource(owner) if uses.reads else ""
    return wrong + [f"{name} is no longer read" for name in uses.reads if name not in source]


@cache
def found(owner: str) -> Any:
    """Import the module, or the object ``module:Name``; for a Ray actor, return the class that it was made from."""
    module, _, name = owner.partition(":")
    thing = importlib.import_module(module)
    thing = getattr(thing, name) if name else thing
    return getattr(getattr(thing, "__ray_metadata__", None), "modified_class", thing)


def has(owner: Any, name: str) -> bool:
    """Return whether ``owner`` has ``name``: a member, a field, or an attribute that its methods assign on ``self``."""
    if hasattr(owner, name):
        return True
    if not inspect.isclass(owner):
        return False
    return any(name in getattr(base, "__annotations__", {}) for base in owner.__mro__) or name in _assigned(owner)


@cache
def _assigned(owner: type) -> set[str]:
    """Names that the methods of a class, or of its bases, assign on ``self``."""
    sources = [inspect.getsource(base) for base in owner.__mro__ if base.__module__.split(".")[0] in UPSTREAM]
    trees = [ast.parse(textwrap.dedent(source)) for source in sources]
    stores = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {n.attr for n in stores if isinstance(n.ctx, ast.Store) and ast.unparse(n.value) == "self"}


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that a caller fills: none of ``self``, ``cls`` and those that ``ray.remote`` adds."""
    taken = [p for p in inspect.signature(function).parameters.values() if not p.name.startswith("_ray_")]
    return taken[1:] if taken and taken[0].name in ("self", "cls") else taken


def refusal(function: Callable[..., Any], passed: str) -> str | None:
    """Say why ``function`` cannot be called with ``passed`` (as in ``Uses.calls``); None if it can."""
    taken = parameters(function)
    by_position, by_name = (re.findall(r"\w+", part) for part in f"{passed}*".split("*")[:2])
    ordered = [p.name for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if ordered[: len(by_position)] != by_position:
        return f"takes ({', '.join(ordered)}) by position, not ({', '.join(by_position)})"
    try:
        inspect.Signature(taken).bind(*by_position, **dict.fromkeys(by_name))
    except TypeError as error:
        return f"cannot be called as the recipe does: {error}"
    # What goes through **kwargs, to the end of its module, must be looked for there by its name.
    through = set(by_name) - {p.name for p in taken}
    module: Any = inspect.getmodule(function)
    gone = [name for name in through if name not in inspect.getsource(module)]
    return f"takes no {', '.join(gone)}" if gone else None
