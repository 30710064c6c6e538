"""Rules between fields: combinations that a single field's type cannot refuse.

Each rule is a small function from a spec to the problems that it finds. It is in the module of its section. This module
lists the rules and runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from holdfast.spec.errors import Problem
from holdfast.spec.rules.batch import check_auto_micro_batch, check_batch_ramp, check_batch_size
from holdfast.spec.rules.cluster import (
    check_accelerator,
    check_cache_size,
    check_elastic_nodes,
    check_mounts,
    check_node_range,
    check_reserved_environment,
    check_reserved_metadata,
    check_resources,
    check_scheduler_fields,
    check_secret_order,
    check_spares,
    check_step_pods,
    check_straggler_removal,
    check_text_sizes,
    check_topology,
)
from holdfast.spec.rules.data import (
    check_chat,
    check_document_lengths,
    check_dvc,
    check_held_out_data,
    check_own_readers,
    check_plain_text,
    check_shuffle,
    check_source_weights,
    check_text_field,
    check_tokenized,
    check_tokenizer,
)
from holdfast.spec.rules.grpo import check_grpo
from holdfast.spec.rules.model import (
    check_attention_kernel,
    check_experts,
    check_export_dtype,
    check_heads,
    check_latent,
    check_model_family,
    check_rope,
    check_stage_count,
)
from holdfast.spec.rules.objective import check_adapters, check_own_objective, check_preferences
from holdfast.spec.rules.operations import (
    check_evaluation,
    check_no_secrets_in_urls,
    check_own_metrics,
    check_pause,
    check_schedule,
    check_serving,
    check_store,
    check_trackers,
)
from holdfast.spec.rules.parallel import (
    check_auto_layout,
    check_context_parallel,
    check_deal,
    check_expert_layout,
    check_expert_parallel,
    check_offload,
    check_offload_path,
    check_pipeline_stages,
    check_replicas,
    check_resharding,
    check_stage_layers,
    check_tensor_parallel,
)
from holdfast.spec.rules.script import check_data, check_script, check_script_evaluation
from holdfast.spec.rules.training import (
    check_anomalies,
    check_compression,
    check_elastic_determinism,
    check_ema,
    check_fp8,
    check_learning_rate_scaling,
    check_local_tiers,
    check_optimizer,
    check_parameter_groups,
    check_precision,
    check_warmup,
)
from holdfast.spec.section import RefusedFieldError
from holdfast.spec.tree import Spec

__all__ = ["RULES", "Rule", "problems", "problems_of_part"]

Rule = Callable[[Spec], Iterator[Problem]]

# The problems are reported in this order.
RULES: tuple[Rule, ...] = (
    check_precision,
    check_fp8,
    check_auto_layout,
    check_auto_micro_batch,
    check_batch_size,
    check_batch_ramp,
    check_elastic_determinism,
    check_attention_kernel,
    check_heads,
    check_model_family,
    check_experts,
    check_export_dtype,
    check_latent,
    check_expert_layout,
    check_expert_parallel,
    check_rope,
    check_stage_count,
    check_pipeline_stages,
    check_stage_layers,
    check_deal,
    check_tensor_parallel,
    check_context_parallel,
    check_replicas,
    check_resharding,
    check_offload,
    check_offload_path,
    check_warmup,
    check_adapters,
    check_preferences,
    check_grpo,
    check_own_objective,
    check_learning_rate_scaling,
    check_compression,
    check_optimizer,
    check_parameter_groups,
    check_ema,
    check_anomalies,
    check_local_tiers,
    check_node_range,
    check_elastic_nodes,
    check_spares,
    check_straggler_removal,
    check_scheduler_fields,
    check_secret_order,
    check_accelerator,
    check_step_pods,
    check_topology,
    check_resources,
    check_mounts,
    check_reserved_environment,
    check_reserved_metadata,
    check_text_sizes,
    check_cache_size,
    check_held_out_data,
    check_evaluation,
    check_pause,
    check_own_metrics,
    check_text_field,
    check_tokenized,
    check_own_readers,
    check_source_weights,
    check_tokenizer,
    check_plain_text,
    check_chat,
    check_shuffle,
    check_document_lengths,
    check_dvc,
    check_no_secrets_in_urls,
    check_store,
    check_trackers,
    check_schedule,
    check_serving,
    check_data,
)
# The rules of a spec with a training script.
SCRIPT_RULES: tuple[Rule, ...] = (
    check_script,
    check_script_evaluation,
    check_own_metrics,
    check_local_tiers,
    check_node_range,
    check_elastic_nodes,
    check_spares,
    check_scheduler_fields,
    check_secret_order,
    check_accelerator,
    check_step_pods,
    check_topology,
    check_resources,
    check_mounts,
    check_reserved_environment,
    check_reserved_metadata,
    check_text_sizes,
    check_cache_size,
    check_text_field,
    check_tokenized,
    check_own_readers,
    check_source_weights,
    check_tokenizer,
    check_plain_text,
    check_shuffle,
    check_document_lengths,
    check_dvc,
    check_no_secrets_in_urls,
    check_store,
    check_trackers,
    check_schedule,
    check_serving,
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
