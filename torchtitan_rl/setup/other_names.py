"""What options of other libraries are called here: those of transformers, TRL, verl, OpenRLHF, vLLM and PEFT."""

_OBJECTIVE = "a part of config.algorithm, set in a config function (docs/papers.md#what-the-settings-mean-together)"

_BY_OURS = {
    "--algorithm.entropy-coef": "entropy_coeff entropy_loss_coef",
    "--algorithm.kl.coef": "beta kl_coef kl_loss_coef init_kl_coef kl_coeff kl_beta",
    "--algorithm.kl.estimator": "kl_estimator kl_loss_type kl_penalty",
    "--algorithm.loss.eps-low": "epsilon clip_ratio clip_ratio_low eps_clip cliprange clip_range",
    "--algorithm.loss.eps-high": "epsilon_high clip_ratio_high eps_clip_high",
    "--algorithm.truncation.mode": "mask_truncated_completions overlong_filter",
    "--checkpoint.interval": "save_steps save_freq save_strategy save_interval",
    "--checkpoint.keep-latest-k": "save_total_limit max_ckpt_num max_actor_ckpt_to_keep",
    "--conversations.max-turns": "max_tool_calling_iterations max_assistant_turns",
    "--dump-folder": "output_dir default_local_dir save_path ckpt_path logging_dir run_name experiment_name",
    "--evaluation.best-by": "metric_for_best_model load_best_model_at_end",
    "--evaluation.every": "eval_steps eval_strategy evaluation_strategy test_freq eval_interval do_eval",
    "--evaluation.sampling.n": "num_generations_eval",
    "--generator.gpu-memory-utilization": "vllm_gpu_memory_utilization",
    "--generator.max-model-len": "vllm_max_model_length max_model_length max_seq_length max_length",
    "--generator.sleep": "vllm_enable_sleep_mode free_cache_engine",
    "--generator.tensor-parallel-degree": "vllm_tensor_parallel_size",
    "--grader.rewards": "reward_funcs reward_function custom_reward_function remote_rm_url reward_fn",
    "--grader.weights": "reward_weights",
    "--hf-assets-path": "model model_name model_name_or_path model_path pretrain tokenizer tokenizer_name tokenizer_path",
    "--metrics.console-every": "logging_steps log_freq",
    "--metrics.keep-all-rows": "log_completions",
    "--metrics.project": "wandb_project project_name",
    "--metrics.sinks": "report_to logger use_wandb",
    "--num-prompts-per-step": "batch_size per_device_train_batch_size train_batch_size rollout_batch_size generation_batch_size",
    "--num-steps": "max_steps num_train_epochs total_epochs total_training_steps num_episodes max_epochs train_steps epochs",
    "--prompts.max-prompt-tokens": "max_prompt_length prompt_max_len",
    "--resume": "resume_from_checkpoint load_checkpoint resume_mode",
    "--sampling.max-tokens": "max_completion_length max_response_length max_new_tokens generate_max_len response_length",
    "--sampling.n": "num_generations n_samples_per_prompt num_return_sequences num_samples group_size",
    "--task.path": "dataset dataset_name dataset_path data_path train_file train_files prompt_data input_key",
    "--teacher": "teacher_model_name_or_path teacher_model",
    "--trainer.activation-checkpoint": "gradient_checkpointing enable_gradient_checkpointing",
    "--trainer.compile": "torch_compile use_torch_compile",
    "--trainer.lora.alpha": "lora_alpha",
    "--trainer.lora.rank": "use_peft lora_r r",
    "--trainer.lora.targets": "lora_target_modules target_modules lora_modules",
    "--trainer.lr-scheduler.decay-type": "lr_scheduler_type lr_scheduler lr_warmup_style",
    "--trainer.lr-scheduler.warmup-steps": "warmup_ratio lr_warmup_ratio lr_warmup_steps lr_warmup_steps_ratio",
    "--trainer.max-norm": "max_grad_norm grad_clip clip_grad max_norm_grad gradient_clip_val",
    "--trainer.max-tokens-per-microbatch": (
        "gradient_accumulation_steps micro_train_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu micro_batch_size"
    ),
    "--trainer.mixed-precision-param bfloat16 --generator.dtype bfloat16": "bf16 torch_dtype param_dtype",
    "--trainer.num-epochs": "num_iterations ppo_epochs",
    "--trainer.num-minibatches": "ppo_mini_batch_size steps_per_generation mini_batch_size",
    "--trainer.optimizer.lr": "learning_rate actor_learning_rate",
    "none, as the engine is always vLLM in the trainer's process": "use_vllm vllm_mode vllm_server_host vllm_server_base_url",
    "none, as the engine has vLLM's own scheduler": "scheduler",
    "NGPU=N before the command": "nproc nproc_per_node n_gpus_per_node num_processes num_gpus gpus actor_num_gpus_per_node",
    "NNODES=N before the command": "nnodes num_nodes num_machines",
    f"config.algorithm.loss, {_OBJECTIVE}": "loss_type policy_loss importance_sampling_level loss_agg_mode",
    f"config.algorithm.advantage, {_OBJECTIVE}": "adv_estimator advantage_estimator scale_rewards norm_adv_by_std_in_grpo",
    f"config.algorithm.mismatch, {_OBJECTIVE}": "vllm_importance_sampling_correction vllm_importance_sampling_mode",
    "config.trainer.optimizer, set in a config function (docs/extending.md)": "optim optim_type",
}

OTHER_NAMES = {name: ours for ours, names in _BY_OURS.items() for name in names.split()}
"""Ours by the other's name, the last part of an option with underscores."""

_TASKS = ("rows", "gsm8k", "math", "countdown", "reasoning_gym")
_OBJECTIVES = ("dapo", "dr_grpo", "rloo", "gspo", "cispo", "maxent", "seed_grpo")
FORMER_CONFIGS = {
    "qwen3": "sums",
    "debug_lora": "debug --trainer.lora.rank 16 --trainer.optimizer.lr 1e-3",
    **{f"qwen3_{task}": task for task in _TASKS},
    **{f"debug_{cell}": f"scripts/results_cells.py:{cell}" for cell in _OBJECTIVES},
}
"""What is given to --config now for a name that it had before 2026-11-26."""
