"""Rules between fields: combinations that a single field's type cannot refuse.

Each rule is a small function from a spec to the problems it sees, in the module of the section that it is about: here
they are listed and run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from holdfast.spec.errors import Problem
from holdfast.spec.rules.cluster import (
    accelerator_is_possible,
    cluster_words_agree,
    elastic_nodes_are_possible,
    nodes_ordered,
    spares_can_take_a_seat,
    stragglers_leave_nodes,
    topology_is_possible,
)
from holdfast.spec.rules.data import (
    chat_is_possible,
    dvc_complete,
    lengths_ordered,
    shuffle_words_agree,
    something_is_held_out,
    text_field_is_read,
    tokenizer_given,
    weights_given,
)
from holdfast.spec.rules.evaluation import evaluation_words_agree
from holdfast.spec.rules.model import (
    experts_are_possible,
    family_has_it,
    heads_divide,
    rope_words_agree,
    stages_fit,
)
from holdfast.spec.rules.parallel import (
    experts_are_dealt,
    experts_can_be_trained,
    layout_is_left_to_the_planner,
    model_can_be_cut,
    offload_is_possible,
    offload_path_is_possible,
    replicas_are_possible,
    resharding_is_possible,
    sequences_can_be_cut,
    stages_are_possible,
    stages_have_all_layers,
)
from holdfast.spec.rules.pods import (
    cache_fits,
    environment_is_free,
    metadata_is_free,
    mounts_differ,
    resources_suffice,
    step_pods_are_possible,
    texts_fit_an_object,
)
from holdfast.spec.rules.precision import fp8_is_possible, precision_is_possible
from holdfast.spec.rules.schedule import schedule_parses
from holdfast.spec.rules.secrets import no_secret_in_urls
from holdfast.spec.rules.serving import serving_is_possible, store_known
from holdfast.spec.rules.training import (
    adapters_are_possible,
    anomalies_are_possible,
    batch_divides,
    batch_grows_evenly,
    compression_is_possible,
    elastic_determinism_is_possible,
    near_tiers_are_placed,
    optimizer_is_there,
    preferences_are_possible,
    rate_follows_batch,
    warmup_fits,
)
from holdfast.spec.section import RefusedFieldError
from holdfast.spec.tree import Spec

__all__ = ["RULES", "Rule", "problems", "problems_of_part"]

Rule = Callable[[Spec], Iterator[Problem]]

# In this order a person reads the problems.
RULES: tuple[Rule, ...] = (
    precision_is_possible,
    fp8_is_possible,
    layout_is_left_to_the_planner,
    batch_divides,
    batch_grows_evenly,
    elastic_determinism_is_possible,
    heads_divide,
    family_has_it,
    experts_are_possible,
    experts_can_be_trained,
    experts_are_dealt,
    rope_words_agree,
    stages_fit,
    stages_are_possible,
    stages_have_all_layers,
    model_can_be_cut,
    sequences_can_be_cut,
    replicas_are_possible,
    resharding_is_possible,
    offload_is_possible,
    offload_path_is_possible,
    warmup_fits,
    adapters_are_possible,
    preferences_are_possible,
    rate_follows_batch,
    compression_is_possible,
    optimizer_is_there,
    anomalies_are_possible,
    near_tiers_are_placed,
    nodes_ordered,
    elastic_nodes_are_possible,
    spares_can_take_a_seat,
    stragglers_leave_nodes,
    cluster_words_agree,
    accelerator_is_possible,
    step_pods_are_possible,
    topology_is_possible,
    resources_suffice,
    mounts_differ,
    environment_is_free,
    metadata_is_free,
    texts_fit_an_object,
    cache_fits,
    something_is_held_out,
    evaluation_words_agree,
    text_field_is_read,
    weights_given,
    tokenizer_given,
    chat_is_possible,
    shuffle_words_agree,
    lengths_ordered,
    dvc_complete,
    no_secret_in_urls,
    store_known,
    schedule_parses,
    serving_is_possible,
)


def problems(spec: Spec) -> list[Problem]:
    """Everything that the rules object to, in the order of the rules."""
    return [problem for rule in RULES for problem in rule(spec)]


def problems_of_part(spec: Spec) -> list[Problem]:
    """The same of a spec from which the fields that were refused are missing: a rule ends where it would need one."""
    found: list[Problem] = []
    for rule in RULES:
        with suppress(RefusedFieldError):
            for problem in rule(spec):
                found.append(problem)
    return found
