"""What the recipe and verl_ext take from verl that pyright cannot see; ``test_upstream_contract.py`` checks it.

``preflight.vllm_contract`` has what they take from vLLM, and says how an entry is written.
"""

from recipe.partial_rollout.preflight.vllm_contract import NEEDED, OPTIONAL, entries

VERLS = """\
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
        _load_checkpoint _save_checkpoint _compute_reward_colocate _update_actor _update_critic _validate
        _val_metrics_update _get_required_batch_multiple _balance_batch use_critic
        _dump_generations _shutdown_dump_executor get_llm_client get_teacher_client get_reward_handles
        kl_ctrl_in_reward
verl.trainer.ppo.v1.trainer_base <- v1 trainer verl_command trained_rows joined_rows
    has: compute_data_metrics compute_variance_proxy_metrics compute_advantage_for_multi_trajectories
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
verl.experimental.agent_loop.agent_loop:AgentLoopWorker <- observed agent_loop_manager pictures
    has: config rollout_config llm_client tokenizer processor hf_model_type dataset_cls tools
        reward_loop_worker_handles __init__ generate_sequences _run_agent_loop _agent_loop_postprocess _compute_score
        _postprocess mm_processor_kwargs _get_mm_processor_kwargs
    calls: _compute_multi_modal_inputs(output, input_ids)
        _compute_position_ids(input_ids, attention_mask, multi_modal_inputs)
verl.experimental.agent_loop.agent_loop:AgentLoopOutput <- agent_loop_worker loop_rows observed pictures
    has: prompt_ids response_ids response_mask response_logprobs reward_score num_turns metrics extra_fields
        multi_modal_data
verl.experimental.agent_loop.agent_loop:AgentLoopBase <- observed whole_prompts pictures
    has: __init__ run
    calls: _cap_text_prompt_length(prompt_ids) process_multi_modal_info(messages)
    reads: processor dataset_cls data_config
verl.utils.tokenizer.tokenizer <- rows pictures
    calls: build_multimodal_processor_inputs(processor, *, text, images, mm_processor_kwargs)
        get_processor_token_id(processor, token_name)
verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop <- agent_loop
    has: run
verl.experimental.reward_loop.reward_loop:RewardLoopWorker <- observed rewards reward_workers
    has: compute_score compute_score_batch compute_score_disrm reward_manager
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
verl.workers.config:RolloutConfig <- main_ppo rules learning_rules inputs settings observed llm_client agent_loop_worker
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
verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension <- vllm_plugin
    has: update_weights_from_ipc
torch.distributed <- cpu
    calls: init_process_group(backend)
"""
MEASURED = """\
vllm.engine.arg_utils:EngineArgs <- distribution
    has: model dtype enforce_eager max_model_len max_num_seqs seed speculative_config distributed_executor_backend
        disable_log_stats
vllm:LLM <- distribution
    calls: generate(prompts, sampling_params, *, use_tqdm)
"""
"""what tests/bench and tests/studies take from vLLM"""
CONTRACT = tuple(entries("".join((VERLS, NEEDED, OPTIONAL, MEASURED))))
