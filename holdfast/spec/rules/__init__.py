"""Rules between fields: combinations that a single field's type cannot refuse.

Each rule is a small function from a spec to the problems that it finds. It is in the module of its section. This module
lists the rules and runs them.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress

from holdfast.spec.errors import Problem
from holdfast.spec.rules import (
    batch,
    cluster,
    data,
    grpo,
    model,
    objective,
    operations,
    parallel,
    script,
    training,
)
from holdfast.spec.section import RefusedFieldError
from holdfast.spec.tree import Spec

__all__ = ["RULES", "Rule", "problems", "problems_of_part"]

Rule = Callable[[Spec], Iterator[Problem]]

# The problems are reported in this order.
_TRAINING: tuple[Rule, ...] = (
    training.check_precision,
    training.check_fp8,
    parallel.check_auto_layout,
    batch.check_auto_micro_batch,
    batch.check_batch_size,
    batch.check_batch_ramp,
    training.check_elastic_determinism,
    model.check_attention_kernel,
    model.check_heads,
    model.check_model_family,
    model.check_experts,
    model.check_export_dtype,
    model.check_latent,
    parallel.check_expert_layout,
    parallel.check_expert_parallel,
    model.check_rope,
    model.check_stage_count,
    parallel.check_pipeline_stages,
    parallel.check_stage_layers,
    parallel.check_deal,
    parallel.check_tensor_parallel,
    parallel.check_context_parallel,
    parallel.check_replicas,
    parallel.check_resharding,
    parallel.check_offload,
    parallel.check_offload_path,
    training.check_warmup,
    objective.check_adapters,
    objective.check_preferences,
    grpo.check_grpo,
    objective.check_own_objective,
    training.check_learning_rate_scaling,
    training.check_compression,
    training.check_optimizer,
    training.check_parameter_groups,
    training.check_ema,
    training.check_anomalies,
)
_OPERATION: tuple[Rule, ...] = (
    training.check_local_tiers,
    cluster.check_node_range,
    cluster.check_elastic_nodes,
    cluster.check_spares,
    cluster.check_straggler_removal,
    cluster.check_scheduler_fields,
    cluster.check_secret_order,
    cluster.check_accelerator,
    cluster.check_step_pods,
    cluster.check_topology,
    cluster.check_resources,
    cluster.check_mounts,
    cluster.check_reserved_environment,
    cluster.check_reserved_metadata,
    cluster.check_text_sizes,
    cluster.check_cache_size,
    data.check_held_out_data,
    operations.check_evaluation,
    operations.check_pause,
    operations.check_own_metrics,
    data.check_text_field,
    data.check_tokenized,
    data.check_own_readers,
    data.check_source_weights,
    data.check_tokenizer,
    data.check_plain_text,
    data.check_chat,
    data.check_shuffle,
    data.check_document_lengths,
    data.check_dvc,
    operations.check_no_secrets_in_urls,
    operations.check_store,
    operations.check_trackers,
    operations.check_schedule,
    operations.check_serving,
    script.check_data,
)
RULES = (*_TRAINING, *_OPERATION)
# The rules of a spec with a training script.
_NOT_OF_SCRIPTS = {
    cluster.check_straggler_removal,
    data.check_held_out_data,
    operations.check_evaluation,
    operations.check_pause,
    data.check_chat,
    script.check_data,
}
SCRIPT_RULES: tuple[Rule, ...] = (
    script.check_script,
    script.check_script_evaluation,
    *(rule for rule in _OPERATION if rule not in _NOT_OF_SCRIPTS),
)


def problems(spec: Spec) -> list[Problem]:
    """All problems that the rules find, in the order of the rules."""
    return [problem for rule in _rules(spec) for problem in rule(spec)]


def _rules(spec: Spec) -> tuple[Rule, ...]:
    try:
        return RULES if spec.train.script is None else SCRIPT_RULES
    except RefusedFieldError:
        return ()


def problems_of_part(spec: Spec) -> list[Problem]:
    """The same for a spec without its refused fields. A rule ends where it needs one of them."""
    problems: list[Problem] = []
    for rule in _rules(spec):
        with suppress(RefusedFieldError):
            for problem in rule(spec):
                problems.append(problem)
    return problems
