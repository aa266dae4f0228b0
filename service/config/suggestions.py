"""What an unknown name may have meant: by the words of other tools, by place, then by spelling. Pure."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

MOST_LISTED = 40
"""Most known names that a message lists; it never lists some of them."""
SCHEMA = "`stillhouse schema` lists the known ones"
_LONGEST_WORD = 64

_MEANINGS = {
    "batch.global_size": "batch.size batch_size bs train_batch_size total_batch_size effective_batch_size "
    "global_batch",
    "batch.micro_size": "per_device_train_batch_size per_gpu_train_batch_size device_batch_size "
    "micro_batch_size gradient_accumulation_steps accumulate_grad_batches "
    "accumulation_steps aggregation_frequency",
    "budget.cost_usd": "max_cost budget_usd",
    "budget.hours": "max_time max_hours time_limit deadline",
    "budget.runs": "run_cap",
    "checkpoint.every_steps": "save_steps save_strategy min_checkpoint_period checkpoint_period "
    "checkpoint_every",
    "checkpoint.keep": "save_total_limit checkpoint_storage",
    "deterministic": "full_determinism cudnn_deterministic",
    "distillation.soft_weight": "alpha kd_alpha",
    "distillation.temperature": "kd_temperature",
    "evaluation.batch_size": "per_device_eval_batch_size eval_batch_size per_gpu_eval_batch_size",
    "evaluation.every_epochs": "eval_strategy evaluation_strategy min_validation_period validation_period",
    "evaluation.every_steps": "eval_steps validation_interval",
    "hardware": "accelerator device gpu gpu_type instance_type machine resources.gpus resources.gpu",
    "length.epochs": "num_train_epochs epochs num_epochs max_epochs n_epochs",
    "length.steps": "max_steps steps num_steps train_steps total_steps max_batches num_batches batches",
    "log_every_steps": "logging_steps scheduling_unit",
    "max_restarts": "max_retries retries",
    "model.attention_dropout": "attention_probs_dropout_prob",
    "model.compile": "torch_compile",
    "model.dropout": "hidden_dropout_prob",
    "model.layers": "num_hidden_layers n_layers num_layers",
    "model.name": "model_name_or_path model_name pretrained_model_name_or_path base_model student "
    "hidden_size",
    "model.teacher": "teacher_model teacher_name",
    "model.encoder": "attn_implementation",
    "name": "run_name experiment_name display_name",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon epsilon",
    "optimizer.learning_rate": "lr base_lr peak_lr max_lr initial_lr",
    "optimizer.max_grad_norm": "gradient_clip_val clip_grad_norm grad_clip gradient_clipping clip_norm",
    "optimizer.name": "optim optimizer_name",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler lr_schedule scheduler scheduler_type",
    "optimizer.warmup_fraction": "warmup_ratio warmup warmup_proportion",
    "optimizer.weight_decay": "wd",
    "parallel.activation_checkpointing": "gradient_checkpointing",
    "parallel.engine": "deepspeed",
    "parallel.strategy": "distributed ddp fsdp distributed_strategy",
    "parallel.workers": "slots_per_trial num_gpus n_gpu gpus num_processes world_size nproc_per_node "
    "num_workers",
    "pool": "resource_pool",
    "precision": "fp16 bf16 tf32 fp32 mixed_precision amp dtype torch_dtype half_precision",
    "project": "workspace entity",
    "queue.max_concurrent_runs": "max_concurrent_trials max_slots max_parallel",
    "resources.cpus_per_worker": "dataloader_num_workers cpus num_cpus",
    "search": "searcher sweep tuner",
    "search.axes": "hyperparameters parameters hparams grid axes param_grid search_space",
    "search.metric": "metric_for_best_model",
    "search.name": "method search_algorithm searcher_name",
    "search.samples": "max_trials n_trials num_trials count num_samples",
    "search.stop_diverging": "early_terminate early_stopping",
    "seeds": "seed random_seed data_seed experiment_seed",
    "task.parts": "data_files splits train_split validation_split",
    "task.columns": "text_column label_column column_names",
    "task.max_length": "max_seq_length max_seq_len sequence_length seq_len max_len seq_length",
    "task.name": "task_name entrypoint",
    "task.path": "dataset dataset_name data data_dir train_file dataset_path data_path",
    "task.class_weights": "label_weights",
    "task.focal_gamma": "gamma",
    "task.label_smoothing": "label_smoothing_factor smoothing",
    "task.train_examples": "max_train_samples train_samples",
    "task.validation_examples": "max_eval_samples max_val_samples",
    "task.validation_fraction": "validation_split val_split test_size",
    "telemetry.profile_steps": "profiling",
    "accuracy": "acc eval_accuracy val_accuracy validation_accuracy",
    "f1": "f1_score eval_f1 val_f1 validation_f1",
    "train_loss": "training_loss loss",
    "validation_loss": "eval_loss val_loss loss",
    "total_time_s": "runtime duration train_runtime wall_time elapsed",
    "samples_per_s": "train_samples_per_second samples_per_second throughput",
    "cost_usd": "cost price",
    "energy_kwh": "energy",
    "peak_memory_mib": "memory peak_memory max_memory gpu_memory",
}  # fmt: skip
ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        word: tuple(name for name, words in _MEANINGS.items() if word in words.split())
        for word in {word for words in _MEANINGS.values() for word in words.split()}
    }
)
"""Words that people know from Hugging Face, Determined, W&B and Optuna, and what is called so here."""


def meant(word: str, known: Collection[str]) -> list[str]:
    """Returns the known names that mean a word: by alias, else with this last part, else that end in it."""
    whole = word.casefold().replace("-", "_")
    last = whole.rpartition(".")[2]
    aliases = [*ALIASES.get(whole, ()), *ALIASES.get(last, ())]
    return (
        list(dict.fromkeys(name for name in aliases if name in known))
        or [name for name in known if name.rpartition(".")[2] == last]
        or [name for name in known if name.endswith(f"_{last}")]
    )


def nearest(word: str, known: Iterable[str], listed_by: str = "") -> str:
    """Returns `did you mean 'x'?`, or all known names if none is near; of many, what lists them."""
    words = sorted(set(known))
    if suggested := did_you_mean(meant(word, words)):
        return suggested
    close = spelt_like(word, {candidate: candidate for candidate in words})
    return did_you_mean(close[:1]) or all_of(words, listed_by)


def did_you_mean(names: Collection[str]) -> str:
    """Returns nothing for no name, and for more than a question can hold."""
    quoted = " or ".join(f"'{name}'" for name in names)
    return f"did you mean {quoted}?" if 0 < len(names) <= 3 else ""


def spelt_like(word: str, named: Mapping[str, str]) -> list[str]:
    """Returns at most three of the names, by the word that each is compared by; the nearest first."""
    folded = {candidate.casefold(): name for candidate, name in named.items()}
    # Comparing takes the product of the lengths; no known word is that long.
    close = difflib.get_close_matches(word[:_LONGEST_WORD].casefold(), folded, n=3, cutoff=0.6)
    return [folded[candidate] for candidate in close]


def all_of(words: Collection[str], listed_by: str) -> str:
    return listed_by if listed_by and len(words) > MOST_LISTED else "known: " + ", ".join(sorted(words))
