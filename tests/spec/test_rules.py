"""Every rule between fields refuses what it is for, naming the field, the value and the remedy."""

from __future__ import annotations

import pytest

from holdfast.components.spec import parse_spec
from tests.spec.conftest import text_with

CHAT: dict[str, object] = {
    "data.kind": "chat", "data.document_masks": True, "data.tokenizer": {"kind": "file", "path": "t"},
}  # fmt: skip

PAIRS: dict[str, object] = {**CHAT, "data.kind": "preferences"}
LORA: dict[str, object] = {"training.lora.rank": 8, "model.init_from": "w"}

FP8 = {"training.precision": "fp8", "cluster.accelerator": "nvidia"}
BY_RULE: list[tuple[str, dict[str, object], str, object, str]] = [
    ("batch", {"training.global_batch": 20, "training.micro_batch": 8}, "training.global_batch", 20, "use 16 or 24"),
    ("batch below unit", {"training.global_batch": 4, "training.micro_batch": 8}, "training.global_batch", 4, "use 8,"),
    ("batch of ranks", {"parallel.processes": 3}, "training.global_batch", 32, "use 24 or 48"),
    ("width", {"model.hidden": 100, "model.heads": 8}, "model.hidden", 100, "use 112"),
    ("odd heads", {"model.hidden": 20, "model.heads": 4}, "model.hidden", 20, "use 24"),
    ("kv heads", {"model.kv_heads": 3}, "model.kv_heads", 3, "use one of [1, 2, 4]"),
    ("width of Llama", {"model.hidden": 100, "model.heads": 8, "model.head_dim": 16}, "model.hidden", 100, "use 112"),
    ("odd head", {"model.head_dim": 63}, "model.head_dim", 63, "use 64"),
    ("window of Llama", {"model.sliding_window": 64}, "model.sliding_window", 64, "family: mistral"),
    ("head of Qwen2", {"model.family": "qwen2", "model.head_dim": 64}, "model.head_dim", 64, "family: qwen3"),
    ("scaled by nothing", {"model.rope_scaling.factor": 8}, "model.rope_scaling.factor", 8.0, "llama3 or linear"),
    ("linear waves", {"model.rope_scaling": {"kind": "linear", "factor": 2, "original_context": 64}},
     "model.rope_scaling.original_context", 64, "use kind: llama3"),
    ("scaled by one", {"model.rope_scaling.kind": "linear"}, "model.rope_scaling.factor", 1.0, "above 1"),
    ("crossed waves", {"model.rope_scaling": {"kind": "llama3", "factor": 8, "low_frequency_factor": 4}},
     "model.rope_scaling.high_frequency_factor", 4.0, "above 4"),
    ("warm-up", {"training.schedule.warmup_steps": 300}, "training.schedule.warmup_steps", 300, "use at most 299"),
    ("fp16 of DeepSpeed", {"training.precision": "fp16", "parallel.strategy": "zero2"}, "training.precision", "fp16",
     "ddp or fsdp"),
    ("fp8 of a CPU", {"training.precision": "fp8"}, "cluster.accelerator", "cpu", "bf16"),
    ("fp8 of DeepSpeed", {**FP8, "parallel.strategy": "zero2"}, "parallel.strategy", "zero2", "ddp or fsdp"),
    ("fp8 of parts", {**FP8, "parallel.tensor": 2, "parallel.processes": 2}, "parallel.tensor", 2, "use 1"),
    ("fp8 of halves", {**FP8, "parallel.pipeline": 2, "parallel.processes": 2, "parallel.schedule": "zero_bubble",
     "model.tie_embeddings": False}, "parallel.schedule", "zero_bubble", "1f1b"),
    ("fp8 of experts", {**FP8, "model.family": "qwen2_moe", "model.experts": 4, "model.routing.shared": 1},
     "model.experts", 4, "bf16"),
    ("fp8 of adapters", {**FP8, "model.init_from": "hf:a/b", "training.lora.rank": 8}, "training.lora.rank", 8, "bf16"),
    ("fp8 of pairs", {**FP8, "model.init_from": "hf:a/b", "data.kind": "preferences"}, "data.kind", "preferences",
     "bf16"),
    ("fp8 of odd rows", {**FP8, "model.context": 9, "training.micro_batch": 8}, "model.context", 9, "bf16"),
    ("fp8 of odd columns", {**FP8, "model.ffn": 100}, "model.ffn", 100, "bf16"),
    ("scale of nothing", {"training.loss_scale.initial_power": 8}, "training.loss_scale", None, "fp16"),
    ("skip of DeepSpeed", {"training.anomalies.action": "skip", "parallel.strategy": "zero2"},
     "training.anomalies.action", "skip", "ddp or fsdp"),
    ("compressed shards", {"training.gradient_compression": "bf16", "parallel.strategy": "fsdp"},
     "training.gradient_compression", "bf16", "ddp"),
    ("compressed experts", {"training.gradient_compression": "bf16", "parallel.expert": 2},
     "training.gradient_compression", "bf16", "ddp"),
    ("compressed tree", {"training.gradient_compression": "fp16", "training.determinism": "elastic"},
     "training.gradient_compression", "fp16", "exact"),
    ("LAMB of DeepSpeed", {"training.optimizer.kind": "lamb", "parallel.strategy": "zero2"},
     "training.optimizer.kind", "lamb", "adamw"),
    ("LAMB of stages", {"training.optimizer.kind": "lamb", "parallel.pipeline": 2, "parallel.processes": 2,
     "model.tie_embeddings": False}, "training.optimizer.kind", "lamb", "adamw"),
    ("LAMB of hosts", {"training.optimizer.kind": "lamb", "parallel.strategy": "fsdp",
     "parallel.offload": "parameters"}, "training.optimizer.kind", "lamb", "adamw"),
    ("skipped places", {"training.gradient_compression": "topk", "training.anomalies.action": "skip"},
     "training.gradient_compression", "topk", "rewind"),
    ("skipped error", {"training.gradient_compression": "powersgd", "training.anomalies.action": "skip"},
     "training.gradient_compression", "powersgd", "rewind"),
    ("half a ramp", {"training.batch_ramp.start": 8}, "training.batch_ramp.increment", None, "add it"),
    ("ramp beside", {"training.batch_ramp": {"start": 8, "increment": 16, "steps": 9}},
     "training.batch_ramp.increment", 16, "divides the difference"),
    ("steep ramp", {"training.batch_ramp": {"start": 8, "increment": 8, "steps": 2}},
     "training.batch_ramp.increment", 8, "larger"),
    ("ramp of parts", {"training.batch_ramp": {"start": 24, "increment": 4, "steps": 9}},
     "training.batch_ramp.increment", 4, "use 8"),
    ("ramp of DeepSpeed", {"training.batch_ramp": {"start": 8, "increment": 8, "steps": 9},
     "parallel.strategy": "zero1"}, "parallel.strategy", "zero1", "remove training.batch_ramp"),
    ("ramp for ranks", {"training.batch_ramp": {"start": 8, "increment": 8, "steps": 9}, "parallel.processes": 2,
     "training.determinism": "elastic"}, "training.batch_ramp.start", 8, "at least 16"),
    ("scaled to nothing", {"training.schedule.scaling": "sqrt"}, "training.schedule.base_batch", None, "name the"),
    ("base of nothing", {"training.schedule.base_batch": 32}, "training.schedule.base_batch", 32, "linear or sqrt"),
    ("disk", {"checkpoint.disk.every_steps": 5}, "checkpoint.disk.path", None, "/scratch/holdfast"),
    ("near disk", {"checkpoint.disk": {"every_steps": 5, "path": "near"}}, "checkpoint.disk.path", "near", "use"),
    ("tokenizer", {"data.tokenizer.kind": "file"}, "data.tokenizer.path", None, "name a tokenizer.json"),
    ("unused path", {"data.tokenizer.path": "t.json"}, "data.tokenizer.path", "t.json", "use kind: file"),
    ("repo", {"data.sources.0.repo": "../data"}, "data.sources.0.repo", "../data", "dvc:corpus/*.txt"),
    ("revision", {"data.sources.0.revision": "v1"}, "data.sources.0.revision", "v1", "dvc:corpus/*.txt"),
    ("weights", {"data.sources": [{"uri": "a", "weight": 1}, {"uri": "b"}]}, "data.sources.1.weight", None, "every"),
    ("store", {"store": "gs://bucket"}, "store", "gs://bucket", "s3://bucket/prefix"),
    ("relative store", {"store": "file://here"}, "store", "file://here", "file:///path"),
    ("no bucket", {"store": "s3://"}, "store", "s3://", "s3://bucket/prefix"),
    ("password", {"store": "s3://key:hunter2@bucket"}, "store", "(hidden)", "environment"),
    ("signature", {"data.sources.0.uri": "s3://b/x?Sig=hunter2"}, "data.sources.0.uri", "(hidden)", "environment"),
    ("token", {"data.sources.0": {"uri": "dvc:x", "repo": "https://hunter2@host/r"}}, "data.sources.0.repo", "(hidden)",
     "environment"),
    ("held out", {"data.validation_fraction": 0}, "data.validation_fraction", 0, "0.01"),
    ("tolerance of nothing", {"evaluation": {"champion_tolerance": 0.1, "versus_champion": "better"}},
     "evaluation.champion_tolerance", 0.1, "use not_worse"),
    ("samples of nothing", {"evaluation.sample_tokens": 9}, "evaluation.sample_tokens", 9, "evaluation.prompts"),
    ("heat of nothing", {"evaluation.temperature": 0}, "evaluation.temperature", 0.0, "evaluation.prompts"),
    ("field of text", {"data.sources.0": {"uri": "a", "format": "text", "text_field": "body"}},
     "data.sources.0.text_field", "body", "format: jsonl"),
    ("weights url", {"model.init_from": "s3://key:hunter2@bucket"}, "model.init_from", "(hidden)", "environment"),
    ("cron", {"schedule.cron": "every day"}, "schedule.cron", "every day", "0 3 * * 1"),
    ("cron of six", {"schedule.cron": "0 0 3 * * 1"}, "schedule.cron", "0 0 3 * * 1", "0 3 * * 1"),
    ("two schedules", {"schedule.cron": "0 3 * * 1", "schedule.every_minutes": 5}, "schedule.every_minutes", 5, "keep"),
    ("zone", {"schedule.timezone": "Europe/Berln"}, "schedule.timezone", "Europe/Berln", "'Europe/Berlin'"),
    ("no zone", {"schedule.timezone": "../../etc/passwd"}, "schedule.timezone", "../../etc/passwd", "Europe/Berlin"),
    ("zone of nothing", {"schedule.timezone": ""}, "schedule.timezone", "", "Europe/Berlin"),
    ("vocabulary of a file", {"data.tokenizer": {"kind": "file", "path": "t", "vocabulary": 9000}},
     "data.tokenizer.vocabulary", 9000, "remove it"),
    ("rows of a trained one", {"data.tokenizer.rows": 9000}, "data.tokenizer.rows", 9000, "kind: file"),
    ("template of text", {"data.chat.template": "t"}, "data.chat.template", "t", "use kind: chat"),
    ("chat in a trained one", {"data.kind": "chat", "data.document_masks": True}, "data.tokenizer.kind", "bpe",
     "use kind: file"),
    ("chat without masks", {"data.kind": "chat", "data.tokenizer": {"kind": "file", "path": "t"}},
     "data.document_masks", False, "use true"),
    ("chat in parquet", {**CHAT, "data.sources.0": {"uri": "a", "format": "parquet"}}, "data.sources.0.format",
     "parquet", "use jsonl"),
    ("text of a chat", {**CHAT, "data.sources.0": {"uri": "a", "text_field": "body"}}, "data.sources.0.text_field",
     "body", "`messages`"),
    ("template url", {**CHAT, "data.chat.template": "s3://k:hunter2@b/t"}, "data.chat.template", "(hidden)",
     "environment"),
    ("preferences over nothing", PAIRS, "model.init_from", None, "name them"),
    ("preferences of text", {"training.preference.beta": 0.5}, "training.preference.beta", 0.5, "kind: preferences"),
    ("preferences of ZeRO", {**PAIRS, "model.init_from": "w", "parallel.strategy": "zero1"}, "parallel.strategy",
     "zero1", "ddp or fsdp"),
    ("pairs in parquet", {**PAIRS, "model.init_from": "w", "data.sources.0": {"uri": "a", "format": "parquet"}},
     "data.sources.0.format", "parquet", "`rejected`"),
    ("adapters to nothing", {"training.lora.rank": 8}, "model.init_from", None, "name them"),
    ("scale of nothing", {"training.lora.alpha": 8}, "training.lora.alpha", 8.0, "give training.lora.rank"),
    ("adapters twice", {**LORA, "training.lora.targets": ["q_proj", "q_proj"]}, "training.lora.targets",
     ("q_proj", "q_proj"), "each once"),
    ("adapters of ZeRO", {**LORA, "parallel.strategy": "zero1"}, "parallel.strategy", "zero1", "ddp or fsdp"),
    ("cut adapters", {**LORA, "parallel.tensor": 2, "parallel.processes": 2}, "parallel.tensor", 2, "use 1"),
    ("staged adapters", {**LORA, "parallel.pipeline": 2, "parallel.processes": 2, "model.tie_embeddings": False},
     "parallel.pipeline", 2, "use 1"),
    ("window of nothing", {"data.shuffle.window": 2}, "data.shuffle.window", 2, "use kind: blocks"),
    ("lengths", {"data.cleaning": {"min_characters": 9, "max_characters": 5}}, "data.cleaning.min_characters", 9,
     "use at most 5"),
    ("stages", {"parallel.pipeline": 8}, "parallel.pipeline", 8, "use at most 4"),
    ("nodes", {"cluster.nodes.min": 3, "cluster.nodes.max": 2}, "cluster.nodes.min", 3, "use at most 2"),
    ("slow node", {"cluster.stragglers": "exclude"}, "cluster.stragglers", "exclude", "use report"),
    ("tensor heads", {"parallel.tensor": 3, "parallel.processes": 3}, "model.heads", 4, "use a multiple of 3"),
    ("tensor kv", {"parallel.tensor": 4, "model.kv_heads": 2}, "model.kv_heads", 2, "use a multiple of 4"),
    ("groups", {"parallel.tensor": 4}, "parallel.processes", 1, "a multiple of 4"),
    ("schedule of nothing", {"parallel.schedule": "gpipe"}, "parallel.schedule", "gpipe", "or remove it"),
    ("stages of nothing", {"parallel.stages": [4]}, "parallel.stages", [4], "parallel.pipeline: 2 or more, or remove"),
    ("too few stages", {"parallel.pipeline": 2, "parallel.processes": 2, "parallel.stages": [4]}, "parallel.stages",
     [4], "give 2 numbers"),
    ("stages of a round", {"parallel.pipeline": 2, "parallel.processes": 2, "parallel.stages": [2, 2],
     "parallel.schedule": "interleaved"}, "parallel.stages", [2, 2], "give 4 numbers"),
    ("layers of no stage", {"parallel.pipeline": 2, "parallel.processes": 2, "parallel.stages": [1, 2]},
     "parallel.stages", [1, 2], "make 4"),
    ("stage of no layer", {"parallel.pipeline": 2, "parallel.processes": 2, "parallel.stages": [4, 0]},
     "parallel.stages", [4, 0], "at least 1"),
    ("pipeline of DeepSpeed", {"parallel.pipeline": 2, "parallel.processes": 2, "parallel.strategy": "zero1",
     "model.tie_embeddings": False}, "parallel.pipeline", 2, "use parallel.strategy: fsdp or ddp"),
    ("pipeline and elastic", {"parallel.pipeline": 2, "parallel.processes": 2, "training.determinism": "elastic",
     "model.tie_embeddings": False}, "parallel.pipeline", 2, "training.determinism: exact"),
    ("empty pipeline", {"parallel.pipeline": 2, "parallel.processes": 2, "training.micro_batch": 32,
     "model.tie_embeddings": False}, "parallel.schedule", "1f1b", "a multiple of 2"),
    ("halves of a compiled stage", {"parallel.pipeline": 2, "parallel.processes": 2, "model.tie_embeddings": False,
     "parallel.schedule": "zero_bubble", "training.compile": True}, "parallel.schedule", "zero_bubble", "use 1f1b"),
    ("halves computed again", {"parallel.pipeline": 2, "parallel.processes": 2, "model.tie_embeddings": False,
     "parallel.schedule": "zero_bubble", "training.activation_checkpointing": "full"}, "parallel.schedule",
     "zero_bubble", "use 1f1b"),
    ("halves without weights", {"parallel.pipeline": 2, "parallel.processes": 4, "model.tie_embeddings": False,
     "parallel.schedule": "zero_bubble", "parallel.strategy": "fsdp"}, "parallel.reshard", "always", "use never"),
    ("offloaded replicas", {"parallel.offload": "optimizer"}, "parallel.offload", "optimizer", "zero2, or none"),
    ("half of what is sharded", {"parallel.offload": "optimizer", "parallel.strategy": "fsdp"}, "parallel.offload",
     "optimizer", "use parameters"),
    ("offloaded matrices", {"parallel.offload": "parameters", "parallel.strategy": "fsdp", "parallel.tensor": 2,
     "parallel.processes": 4}, "parallel.offload", "parameters", "use parallel.tensor: 1, or none"),
    ("offloaded sums", {"parallel.offload": "parameters", "parallel.strategy": "fsdp",
     "training.determinism": "elastic"}, "parallel.offload", "parameters", "determinism: exact, or none"),
    ("offloaded weights", {"parallel.offload": "parameters", "parallel.strategy": "zero2"}, "parallel.offload",
     "parameters", "zero3, or optimizer"),
    ("swap files of FSDP2", {"parallel.offload": "parameters", "parallel.strategy": "fsdp", "parallel.offload_path":
     "/nvme"}, "parallel.offload_path", "/nvme", "use parallel.strategy: zero3"),
    ("swap files of nothing", {"parallel.offload_path": "/nvme", "parallel.strategy": "zero3"}, "parallel.offload_path",
     "/nvme", "use parallel.offload: optimizer"),
    ("swap files somewhere", {"parallel.offload": "optimizer", "parallel.strategy": "zero3", "parallel.offload_path":
     "nvme"}, "parallel.offload_path", "nvme", "begins with /"),
    ("swap files of a planner", {"parallel.auto": True, "parallel.offload_path": "/nvme"}, "parallel.offload_path",
     "/nvme", "remove it, or remove auto"),
    ("resharded replicas", {"parallel.reshard": "never"}, "parallel.reshard", "never", "use parallel.strategy: fsdp"),
    ("halves of a matrix", {"parallel.pipeline": 2, "parallel.processes": 4, "model.tie_embeddings": False,
     "parallel.schedule": "zero_bubble", "parallel.tensor": 2}, "parallel.schedule", "zero_bubble", "use 1f1b"),
    ("interleaved stages", {"parallel.pipeline": 4, "parallel.processes": 4, "model.tie_embeddings": False,
     "parallel.schedule": "interleaved"}, "parallel.pipeline", 4, "use at most 2"),
    ("tensor of DeepSpeed", {"parallel.tensor": 2, "parallel.processes": 2, "parallel.strategy": "zero1"},
     "parallel.tensor", 2, "use parallel.strategy: fsdp or ddp"),
    ("tensor and elastic", {"parallel.tensor": 2, "parallel.processes": 2, "training.determinism": "elastic"},
     "parallel.tensor", 2, "training.determinism: exact"),
    ("tensor sequence", {"parallel.tensor": 2, "parallel.processes": 2, "model.context": 255}, "model.context", 255,
     "use a multiple of 2"),
    ("tensor feed-forward", {"parallel.tensor": 4, "parallel.processes": 4, "model.ffn": 66}, "model.ffn", 66,
     "use a multiple of 4"),
    ("tensor of shared experts", {"parallel.tensor": 8, "parallel.processes": 8, "model.heads": 8,
     "model.family": "qwen2_moe", "model.experts": 4, "model.routing.shared": 1, "model.ffn": 68}, "model.ffn", 68,
     "use a multiple of 8"),
    ("sequence of DeepSpeed", {"parallel.context": 2, "parallel.processes": 2, "parallel.strategy": "zero1"},
     "parallel.context", 2, "use parallel.strategy: fsdp or ddp"),
    ("sequence and elastic", {"parallel.context": 2, "parallel.processes": 2, "training.determinism": "elastic"},
     "parallel.context", 2, "training.determinism: exact"),
    ("experts of odd width", {"model.family": "mixtral", "model.experts": 4, "model.ffn": 66}, "model.ffn", 66,
     "use a multiple of 4"),
    ("experts of odd width in 16 bits", {"model.family": "mixtral", "model.experts": 4, "model.ffn": 68,
     "training.precision": "bf16"}, "model.ffn", 68, "use a multiple of 8"),
    ("experts in a tree", {"parallel.expert": 2, "parallel.processes": 2, "model.experts": 4,
     "model.family": "mixtral", "training.determinism": "elastic"}, "parallel.expert", 2, "use 1"),
    ("cut sequence", {"parallel.context": 2, "parallel.processes": 2, "model.context": 254}, "model.context", 254,
     "use 252 or 256"),
    ("sequence cut twice", {"parallel.context": 2, "parallel.tensor": 4, "parallel.processes": 8, "model.context": 252},
     "model.context", 252, "use 248 or 256"),
    ("replicas of replicas", {"parallel.replicas": 2, "parallel.processes": 2}, "parallel.replicas", 2,
     "use parallel.strategy: fsdp"),
    ("elastic replicas", {"parallel.replicas": 2, "parallel.processes": 2, "parallel.strategy": "fsdp",
     "training.determinism": "elastic"}, "parallel.replicas", 2, "or parallel.strategy: ddp"),
    ("odd replicas", {"parallel.replicas": 3, "parallel.processes": 4, "parallel.strategy": "fsdp"},
     "parallel.replicas", 3, "use one of [1, 2, 4]"),
    ("nodes of replicas", {"parallel.replicas": 2, "parallel.processes": 1, "parallel.strategy": "fsdp",
     "cluster.nodes": {"min": 1, "max": 2}, "training.determinism": "off"}, "cluster.nodes.min", 1,
     "make parallel.processes a multiple of 2"),
    ("nodes of experts", {"parallel.processes": 2, "parallel.tensor": 2, "parallel.expert": 4,
     "model.family": "mixtral", "model.experts": 4, "parallel.strategy": "fsdp", "cluster.nodes": {"min": 1, "max": 2},
     "training.determinism": "off"}, "cluster.nodes.min", 1, "make parallel.processes a multiple of 4"),
    ("elastic and exact", {"cluster.nodes.max": 2}, "cluster.nodes.min", 1, "training.determinism: off"),
    ("elastic DeepSpeed", {"cluster.nodes.max": 2, "training.determinism": "off", "parallel.strategy": "zero2"},
     "cluster.nodes.min", 1, "parallel.strategy: fsdp"),
    ("elastic errors", {"cluster.nodes.max": 2, "training.determinism": "off", "parallel.strategy": "ddp",
     "training.gradient_compression": "topk"}, "cluster.nodes.min", 1,
     "use nodes.min: 2, or training.gradient_compression: fp16"),
    ("elastic sums of DeepSpeed", {"training.determinism": "elastic", "parallel.strategy": "zero2"},
     "training.determinism", "elastic", "parallel.strategy: ddp or fsdp"),
    ("more ranks than grains", {"training.determinism": "elastic", "parallel.processes": 5}, "training.micro_batch", 8,
     "use at most 6"),
    ("half a grain", {"training.determinism": "elastic", "training.global_batch": 36}, "training.global_batch", 36,
     "use 32 or 40"),
    ("elastic sizes", {"cluster.nodes.max": 4, "training.determinism": "off"}, "training.global_batch", 32,
     "every number of nodes between them"),
    ("queue of nobody", {"cluster.queue": "q"}, "cluster.queue", "q", "scheduler: volcano or kueue"),
    ("Kueue", {"cluster.scheduler": "kueue"}, "cluster.queue", None, "name a LocalQueue"),
    ("Volcano Job", {"cluster.job": "volcano"}, "cluster.scheduler", "default", "cluster.job: pytorchjob"),
    ("elastic spares", {"cluster.spares": 1, "cluster.nodes.max": 2, "training.determinism": "off"}, "cluster.spares",
     1, "nodes.max: 3 without spares"),
    ("spares of DeepSpeed", {"cluster.spares": 1, "parallel.strategy": "zero2"}, "cluster.spares", 1, "strategy: fsdp"),
    ("spares of a TrainJob", {"cluster.spares": 1, "cluster.job": "trainjob"}, "cluster.spares", 1, "job: pytorchjob"),
    ("elastic Volcano Job", {"cluster.job": "volcano", "cluster.nodes.max": 2, "training.determinism": "off"},
     "cluster.nodes.min", 1, "use 2"),
    ("elastic TrainJob", {"cluster.job": "trainjob", "cluster.nodes.max": 2, "training.determinism": "off"},
     "cluster.nodes.min", 1, "cluster.job: pytorchjob"),
    ("toleration without value", {"cluster.tolerations.0": {"key": "a", "operator": "Equal"}},
     "cluster.tolerations.0.value", None, "give a value for Equal"),
    ("toleration with value", {"cluster.tolerations.0": {"key": "a", "value": "b"}}, "cluster.tolerations.0.value", "b",
     "none for Exists"),
    ("slice of a CPU", {"cluster.slice": "1g.10gb"}, "cluster.slice", "1g.10gb", "runs on CPU"),
    ("toleration of a step", {"cluster.steps.train.tolerations.0": {"key": "a", "value": "b"}},
     "cluster.steps.train.tolerations.0.value", "b", "none for Exists"),
    ("accelerators of a CPU", {"cluster.steps.evaluate.accelerators": 1}, "cluster.steps.evaluate.accelerators", 1,
     "name an accelerator"),
    ("a share and a whole", {"cluster.accelerator": "nvidia", "cluster.slice": "shared",
     "cluster.steps.evaluate.accelerators": 1}, "cluster.steps.evaluate.accelerators", 1, "keep one of the two"),
    ("no disk", {"cluster.resources.ephemeral_storage": 0}, "cluster.resources.ephemeral_storage", "0", "more than"),
    ("a step of nothing", {"cluster.steps.notify.cpu": "0m"}, "cluster.steps.notify.cpu", "0m", "more than zero"),
    ("a trigger that scores", {"schedule.max_decay": 0.1, "cluster.steps.trigger.memory": "4Gi"},
     "cluster.steps.trigger", "(changed)", "use cluster.steps.evaluate"),
    ("label of ours", {"cluster.labels": {"holdfast/run-id": "x"}}, "cluster.labels.holdfast/run-id", "x", "remove it"),
    ("queue by a label", {"cluster.labels": {"kueue.x-k8s.io/queue-name": "q"}},
     "cluster.labels.kueue.x-k8s.io/queue-name", "q", "use cluster.queue"),
    ("a proxy beside ranks", {"cluster.annotations": {"sidecar.istio.io/inject": "true"}},
     "cluster.annotations.sidecar.istio.io/inject", "true", "stands between"),
    ("a cache above its disk", {"cluster.environment": {"HOLDFAST_CACHE_GIB": "17"}},
     "cluster.environment.HOLDFAST_CACHE_GIB", "17", "ask for more"),
    ("a network of others", {"cluster.accelerator": "ascend", "cluster.network": "efa"}, "cluster.network", "efa",
     "use ethernet or roce"),
    ("half a device", {"cluster.resources.extended": {"rdma/hca": "0.5"}}, "cluster.resources.extended.rdma/hca", "0.5",
     "whole number"),
    ("cores to bind", {"cluster.topology.numa": "require", "cluster.resources.cpu": "3500m"}, "cluster.resources.cpu",
     "3500m", "use 4"),
    ("served from a folder", {"store": "file:///s", "serving.kserve": {}}, "serving.kserve", "(given)", "store in S3"),
    ("served by no GPU", {"serving.kserve": {"accelerators": 1}}, "serving.kserve.accelerators", 1, "use 0"),
    ("fewer than few", {"serving.kserve": {"min_replicas": 3, "max_replicas": 2}}, "serving.kserve.min_replicas", 3,
     "use at most 2"),
    ("served by nothing", {"serving.kserve": {"cpu": "0"}}, "serving.kserve.cpu", "0", "more than zero"),
    ("a token in a URL", {"serving.model_registry": {"url": "http://me:hunter2@registry"}},
     "serving.model_registry.url", "(hidden)", "environment"),
    ("topology of a PyTorchJob", {"cluster.scheduler": "volcano", "cluster.topology.placement": "prefer"},
     "cluster.topology.placement", "prefer", "cluster.job: volcano"),
    ("no cores", {"cluster.resources.cpu": "0.0"}, "cluster.resources.cpu", "0.0", "more than zero"),
    ("no memory", {"cluster.resources.memory": "0Gi"}, "cluster.resources.memory", "0Gi", "more than zero"),
    ("shared memory", {"cluster.resources.memory": "8000Mi"}, "cluster.resources.shared_memory", "8Gi",
     "use at most 8000Mi"),
    ("root", {"cluster.volumes.0": {"claim": "c", "path": "//"}}, "cluster.volumes.0.path", "//", "another path"),
    ("upwards", {"cluster.volumes.0": {"claim": "c", "path": "/a/../tmp"}}, "cluster.volumes.0.path", "/a/../tmp",
     "another path"),
    ("two at one path", {"cluster.volumes": [{"claim": "c", "path": "/a"}, {"claim": "d", "path": "/a/"}]},
     "cluster.volumes.1.path", "/a/", "another path"),
    ("secret variable", {"cluster.environment": {"HF_TOKEN": "hunter2"}}, "cluster.environment.HF_TOKEN", "(hidden)",
     "cluster.secrets"),
    ("secret value", {"cluster.environment": {"PROXY": "http://me:hunter2@p"}}, "cluster.environment.PROXY", "(hidden)",
     "cluster.secrets"),
    ("threads", {"cluster.environment": {"OMP_NUM_THREADS": "9"}}, "cluster.environment.OMP_NUM_THREADS", "9",
     "parallel.threads"),
    ("rendezvous", {"cluster.environment": {"PET_NNODES": "9"}}, "cluster.environment.PET_NNODES", "9", "remove it"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "field", "value", "remedy"), [case[1:] for case in BY_RULE], ids=[c[0] for c in BY_RULE]
)
def test_a_combination_that_cannot_work_is_refused_with_the_remedy(refused, changes, field, value, remedy) -> None:
    found = [problem for problem in refused(**changes) if problem.field == field and remedy in problem.remedy]
    assert [problem.value for problem in found] == [value]
    assert "hunter2" not in "".join(map(str, refused(**changes)))


@pytest.mark.parametrize(
    ("changes"),
    [
        case[1]
        for case in BY_RULE
        if case[0] in ("batch", "batch of ranks", "width", "odd heads", "kv heads", "warm-up")
    ],
)
def test_the_number_that_a_remedy_names_is_accepted(refused, changes) -> None:
    (problem,) = refused(**changes)
    number = int("".join(c if c.isdigit() else " " for c in problem.remedy).split()[0])
    parse_spec(text_with(**{**changes, problem.field: number}))


@pytest.mark.parametrize(
    "changes",
    [
        {"cluster.nodes": {"min": 2, "max": 2}},
        {"cluster.nodes": {"min": 1, "max": 2}, "training.determinism": "off"},
        {"cluster.scheduler": "kueue", "cluster.queue": "team-a", "cluster.topology.placement": "require"},
        {"cluster.scheduler": "volcano", "cluster.job": "volcano", "cluster.topology.placement": "require"},
        {"cluster.tolerations": [{"key": "a", "operator": "Equal", "value": "b"}, {"key": "example.com/c"}]},
        {"cluster.accelerator": "nvidia", "cluster.slice": "1g.10gb"},
        {"cluster.volumes": [{"claim": "c", "path": "/a"}, {"claim": "c", "path": "/a/b"}]},
        {"cluster.environment": {"NCCL_DEBUG": "WARN", "TOKENIZERS_PARALLELISM": "false"}},
        {"cluster.resources": {"cpu": 4, "memory": "64G", "shared_memory": "32Gi"}},
    ],
    ids=str,
)
def test_what_a_cluster_can_do_is_accepted(changes: dict[str, object]) -> None:
    parse_spec(text_with(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel.processes": 4, "parallel.tensor": 2, "parallel.expert": 4, "parallel.strategy": "fsdp",
         "model.family": "mixtral", "model.experts": 4, "cluster.nodes": {"min": 1, "max": 2},
         "training.determinism": "off"},
        {"parallel.processes": 8, "parallel.tensor": 8, "model.heads": 8, "model.family": "mixtral", "model.experts": 4,
         "model.ffn": 68},
        {"parallel.processes": 8, "parallel.tensor": 8, "model.heads": 8, "model.family": "qwen2_moe",
         "model.experts": 4, "model.routing.shared": 2, "model.ffn": 68},
    ],
    ids=["experts over tensor ranks at any number of nodes", "experts are not cut", "shared experts are one layer"],
)  # fmt: skip
def test_what_experts_allow_is_accepted(changes: dict[str, object]) -> None:
    parse_spec(text_with(**changes))


def test_a_field_that_is_left_to_the_planner_has_one_remedy(refused) -> None:
    (problem,) = refused(**{"parallel.auto": True, "parallel.offload_path": "/nvme"})
    assert problem.field == "parallel.offload_path"


@pytest.mark.parametrize("url", ["ssh://git@host/repo", "git@host:repo", "https://host/repo", "../repo"])
def test_a_user_of_ssh_is_no_secret(url: str) -> None:
    parse_spec(text_with(**{"data.sources.0": {"uri": "dvc:x", "repo": url}}))


@pytest.mark.parametrize("uri", ["s3://bucket/part-?.jsonl", "corpus/[ab]?.txt", "s3://[", "python:stdlib"])
def test_globs_are_no_secret(uri: str) -> None:
    parse_spec(text_with(**{"data.sources.0.uri": uri}))


def test_problems_come_in_the_order_of_the_rules_and_all_at_once(refused) -> None:
    found = refused(
        **{
            "schedule.timezone": "x",
            "model.heads": 7,
            "training.global_batch": 3,
            "training.precision": "fp16",
            "parallel.strategy": "zero1",
        }
    )
    assert [problem.field for problem in found] == [
        "training.precision",
        "training.global_batch",
        "model.hidden",
        "schedule.timezone",
    ]
