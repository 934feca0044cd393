"""What the recipe and verl_ext take from verl and vLLM that pyright cannot see; ``test_upstream_contract.py`` checks it.

An entry is a line ``owner <- by``: a module or ``module:Class``, and stems of our files that use it. Below, indented::

    has: attributes: class members, fields, or instance attributes that the class assigns
    calls: functions with what we pass: f(a, b, *, c) is two by position and one by name; upstream may require no more
    reads: config keys and environment variables that its source reads
"""

import re
from typing import NamedTuple


class Uses(NamedTuple):
    owner: str
    by: list[str]
    has: list[str]
    calls: dict[str, str]
    reads: list[str]


def entries(text):
    for entry in re.split(r"\n(?=\S)", text.strip()):
        head, *rest = re.split(r" (has|calls|reads): ", " ".join(entry.split()))
        if not head.startswith("#"):
            owner, by = head.split(" <- ")
            used = {"has": "", "calls": "", "reads": "", **dict(zip(rest[::2], rest[1::2], strict=True))}
            calls = dict(re.findall(r"(\w+)\(([^)]*)\)", used["calls"]))
            yield Uses(owner, by.split(), used["has"].split(), calls, used["reads"].split())


TABLE = """\
# the trainer
verl.trainer.ppo.ray_trainer:RayPPOTrainer <- trainer_run trainer main_ppo task_runner
    has: async_rollout_manager checkpoint_manager llm_server_manager actor_rollout_wg train_dataloader train_dataset
        tokenizer config global_steps total_training_steps __init__ fit init_workers _create_dataloader
        _save_checkpoint _load_checkpoint _get_gen_batch _update_actor _validate
        _val_metrics_update _dump_generations _compute_reward_colocate reward_loop_manager use_rm kl_ctrl_in_reward
    reads: agent_loop_manager_class
verl.trainer.ppo.v1:PPOTrainerSync <- trainer trainer_run task_runner
    has: tokenizer train_dataset train_dataloader llm_server_manager
        checkpoint_manager actor_rollout_wg replay_buffer reward_loop_manager global_steps total_training_steps
        trainer_mode __init__ init fit _setup _build_replay_buffer _init_dataloader on_init_end prepare_step
        _load_checkpoint _save_checkpoint _compute_reward_colocate _update_actor _validate _val_metrics_update
        _dump_generations _shutdown_dump_executor get_llm_client get_teacher_client get_reward_handles
        kl_ctrl_in_reward
verl.trainer.ppo.v1.trainer_base <- v1 trainer verl_command trained_rows
    has: compute_data_metrics compute_variance_proxy_metrics
    calls: register_trainer(name)
    reads: _enable_hybrid_replicas
verl.trainer.constants_ppo <- task_runner plugin
    calls: get_ppo_ray_runtime_env(config)
verl.utils.device <- plugin v1
    calls: auto_set_device(config)
transfer_queue <- rounds trainer task_runner
    has: KVBatchMeta close
    calls: init(conf) kv_batch_put(*, keys, partition_id, fields, tags)
transfer_queue:KVBatchMeta <- rounds trainer
    has: keys tags partition_id extra_info
verl.trainer.main_ppo_v0:BaseTaskRunner <- task_runner
    has: role_worker_mapping __init__ add_actor_rollout_worker add_critic_worker add_reward_model_resource_pool
        init_resource_pool_mgr
verl.single_controller.ray.base:RayWorkerGroup <- sockets
    calls: __init__(*, master_port_range)
verl.workers.engine_workers:ActorRolloutRefWorker <- trainer_run weight_transfer
    calls: set_loss_fn(loss_fn) update_weights(*, global_steps, mode) execute_checkpoint_engine(method)
verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter <- replica sockets
    has: server_handle zmq_handle __init__
    reads: update_weights_from_ipc update_verl_delta_weights
verl.single_controller.ray.base <- replica
    reads: worker_dict fused_worker_dict
# rollout
verl.experimental.agent_loop.agent_loop:AgentLoopManager <- agent_loop_manager
    has: config llm_client teacher_client reward_loop_worker_handles agent_loop_workers agent_loop_workers_class
        __init__ generate_sequences
    calls: _performance_metrics(metrics, output)
verl.experimental.agent_loop.agent_loop:AgentLoopWorker <- observed agent_loop_manager
    has: config rollout_config llm_client tokenizer processor hf_model_type dataset_cls tools
        reward_loop_worker_handles __init__ _run_agent_loop _agent_loop_postprocess _compute_score _postprocess
verl.experimental.agent_loop.agent_loop:AgentLoopOutput <- agent_loop_worker observed
    has: prompt_ids response_ids response_mask response_logprobs reward_score num_turns metrics extra_fields
        multi_modal_data
verl.experimental.agent_loop.agent_loop:AgentLoopBase <- observed whole_prompts
    has: __init__ run
    calls: _cap_text_prompt_length(prompt_ids)
verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop <- agent_loop
    has: run
verl.experimental.reward_loop.reward_loop:RewardLoopWorker <- observed rewards reward_workers
    has: compute_score compute_score_disrm reward_manager
verl.experimental.reward_loop.reward_loop:RewardLoopManager <- reward_workers reward_info
    has: reward_loop_workers_class _init_reward_loop_workers reward_loop_workers compute_rm_score config
verl.workers.rollout.llm_server:LLMServerClient <- observed llm_client
    has: config _load_balancer __init__ generate _acquire_server _release_server _vllm_request_id
verl.workers.rollout.llm_server:LLMServerManager <- trainer_run standalone_engines
    has: __init__ get_replicas
verl.trainer.ppo.ray_trainer <- standalone_engines trained_rows
    has: LLMServerManager apply_kl_penalty compute_data_metrics compute_variance_proxy_metrics
    calls: compute_spec_decode_metrics(spec_drafts, spec_accepts, spec_verifies, non_padding_mask)
verl.trainer.ppo.core_algos <- trained_rows
    has: get_adv_estimator_fn compute_gae_advantage_return compute_grpo_outcome_advantage
verl.trainer.ppo.core_algos:AdaptiveKLController <- trainer_run
    has: value
verl.workers.rollout.replica:TokenOutput <- llm_client observed
    has: token_ids log_probs stop_reason num_preempted extra_fields
verl.workers.rollout.replica:RolloutReplica <- replicas weight_transfer
    has: server_address server_handle workers
    calls: abort_all_requests(*, reject_request) resume_generation() sleep()
verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMReplica <- replica replicas
    has: servers workers server_class gpus_per_replica_node __init__ launch_servers abort_all_requests
        resume_generation sleep
verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer <- replica sockets
    has: config engine global_steps node_rank __init__
    calls: run_server(args) abort_all_requests(reset_prefix_cache, reject_request) clear_kv_cache()
        collective_rpc(method) generate(prompt_ids, sampling_params, request_id) resume_engine_generation()
    reads: VERL_RAY_JOB_ID
verl.checkpoint_engine:CheckpointEngineManager <- weight_transfer
    has: backend backend_cls config actor_wg replicas update_weights sleep_replicas abort_replicas
        resume_generation_replicas release_kv_cache_replicas resume_kv_cache_replicas
verl.checkpoint_engine:CheckpointEngineWorker <- weight_transfer replica
    has: server_adapter update_weights
verl.checkpoint_engine.base:CheckpointEngineWithCache <- shm_weights weight_transfer
    has: prepare build_topology init_process_group finalize send_weights receive_weights get_weights
verl.workers.config:RolloutConfig <- main_ppo rules inputs settings observed llm_client agent_loop_worker
        replica trainer_run
    has: name n nnodes n_gpus_per_node custom agent scheduling_policy free_cache_engine enable_prefix_caching
        calculate_log_probs checkpoint_engine prompt_length response_length max_model_len max_num_seqs temperature
        top_p top_k
verl.workers.config:AgentLoopConfig <- main_ppo agent_loop_worker
    has: agent_loop_manager_class default_agent_loop
verl.workers.config:CheckpointEngineConfig <- rules
    has: backend
verl.experimental.agent_loop.tool_parser:ToolParser <- user_code
    has: _registry
verl.experimental.agent_loop.agent_loop <- user_code
    has: _agent_loop_registry
verl.workers.config:HFModelConfig <- task_runner trainer_config
    has: tokenizer processor override_config use_remove_padding
# data, tools, losses
verl.experimental.reward_loop.reward_manager.base:RewardManagerBase <- reward_workers
    has: __init__ loop
verl.tools.base_tool:BaseTool <- live_sample workspace
    has: __init__ create execute release
verl.tools.function_tool:FunctionTool <- live_sample
    has: fn is_async
    calls: call(parameters)
verl.trainer.ppo.rollout_corr_helper <- loss rule behaviour_weights
    has: SAFETY_BOUND
    calls: compute_rollout_correction_weights(log_ratio, response_mask, *, rollout_is, rollout_is_threshold)
        compute_is_metrics(rollout_is_weights, raw_rollout_is_weights, log_ratio_for_metrics, response_mask,
        rollout_is, rollout_is_threshold, rollout_is_threshold_lower)
verl.utils.model <- packed_attention
    calls: load_valuehead_model(local_path, torch_dtype, model_config, trust_remote_code)
verl.utils.torch_functional <- loss chunked_log_probs
    has: FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE
    calls: masked_mean(values, mask)
verl.workers.config:OptimizerConfig <- trainer_config trainer_run
    has: lr lr_warmup_steps lr_warmup_steps_ratio total_training_steps
verl.workers.config:ActorConfig <- loss
    has: clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c policy_loss global_batch_info
verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync <- sampler
    has: __init__ sample
# verl_ext
verl.plugin.platform.platform_base:PlatformBase <- cpu machine
    has: device_name vendor_name device_module is_available is_platform_available current_device device_count
        set_device synchronize manual_seed manual_seed_all set_allocator_settings empty_cache get_device_capability
        communication_backend_name visible_devices_envvar nvtx_range profiler_start profiler_stop ray_resource_name
        ray_noset_envvars is_ipc_supported rollout_env_vars cudart
verl.workers.engine.fsdp.transformer_impl <- cpu machine
    has: FSDPEngineWithLMHead FSDPEngineWithValueHead CPUOffloadPolicy
verl.utils.tracking:Tracking <- tracking_observer
    has: log
verl.utils.tracking <- tracking_observer main_ppo trackers
    has: Tracking
    reads: VERL_FILE_LOGGER_PATH SWANLAB_MODE SWANLAB_LOG_DIR
torch.distributed <- cpu
    calls: init_process_group(backend)
# vLLM
vllm.v1.engine.async_llm:AsyncLLM <- hold replica vllm_plugin
    has: output_processor engine_core vllm_config errored dead_error
    calls: check_health() add_request(request_id, prompt, params, *, lora_request, priority) abort(request_id, *,
        internal) generate(*, prompt, sampling_params, request_id, lora_request, priority)
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
vllm.v1.core.sched.interface:PauseState <- vllm_plugin
    has: UNPAUSED
vllm.v1.engine.core:EngineCore <- vllm_plugin
    has: scheduler
vllm.v1.core.sched.scheduler:Scheduler <- vllm_plugin
    has: pause_state running
    calls: _preempt_request(request, timestamp) reset_prefix_cache(reset_running_requests, reset_connector) schedule()
vllm.v1.core.sched.output:SchedulerOutput <- vllm_plugin
    has: preempted_req_ids
vllm.config:VllmConfig <- replica
    has: cache_config parallel_config
vllm.config:CacheConfig <- replica
    has: kv_cache_size_tokens
vllm.config:ParallelConfig <- replica
    has: data_parallel_size
vllm.v1.engine.exceptions:EngineDeadError <- replica
vllm.outputs:RequestOutput <- replica
    has: finished outputs metrics
vllm.sampling_params:RequestOutputKind <- replica
    has: CUMULATIVE FINAL_ONLY
vllm.v1.metrics.stats:RequestStateStats <- replica
    has: queued_ts scheduled_ts
vllm.inputs:TokensPrompt <- replica distribution
    has: prompt_token_ids cache_salt
vllm.engine.arg_utils:AsyncEngineArgs <- replica
    has: watermark scheduler_cls
vllm.v1.core.sched.scheduler:Scheduler <- piecewise_scheduler
    calls: update_from_output(scheduler_output, model_runner_output) has_finished_requests()
        finish_requests(request_ids, finished_status)
    has: pause_state __init__
vllm.v1.core.sched.async_scheduler:AsyncScheduler <- piecewise_scheduler
vllm.v1.core.sched.interface:PauseState <- piecewise_scheduler
    has: PAUSED_ALL
vllm.v1.engine:EngineCoreOutput <- piecewise_scheduler
    has: request_id new_token_ids new_logprobs finish_reason events new_prompt_logprobs_tensors prefill_stats routed_experts
vllm.v1.engine:EngineCoreOutputs <- piecewise_scheduler
    has: outputs scheduler_stats finished_requests
vllm.v1.outputs:LogprobsLists <- piecewise_scheduler
vllm.v1.request:RequestStatus <- piecewise_scheduler
    has: FINISHED_ABORTED
vllm:SamplingParams <- llm_client observed agent_loop_worker replica distribution
    has: temperature top_p top_k repetition_penalty logprobs n max_tokens detokenize stop min_tokens seed
        presence_penalty frequency_penalty bad_words thinking_token_budget structured_outputs repetition_detection
        skip_special_tokens spaces_between_special_tokens output_kind flat_logprobs
vllm.v1.engine.detokenizer:IncrementalDetokenizer <- llm_client hold replica
    calls: num_output_tokens() from_new_request(tokenizer, request) update(new_token_ids, *, stop_terminated)
vllm.engine.arg_utils:EngineArgs <- distribution
    has: model dtype enforce_eager max_model_len max_num_seqs seed speculative_config distributed_executor_backend
        disable_log_stats
vllm:LLM <- distribution
    calls: generate(prompts, sampling_params, *, use_tqdm)
vllm.model_executor.layers.utils <- cpu
    calls: dispatch_cpu_unquantized_gemm(layer, remove_weight)
vllm.model_executor.layers.linear:UnquantizedLinearMethod <- cpu
    calls: process_weights_after_loading(layer)
vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod <- cpu
    calls: process_weights_after_loading(layer)
verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension <- vllm_plugin
    has: update_weights_from_ipc
"""
CONTRACT = tuple(entries(TABLE))
