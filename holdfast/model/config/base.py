"""The documents of a base: settings of the tuned model that an export keeps.

They are begin, end and padding tokens, sampling settings and templates. Weights and shape come from the run. Entries
that name code, quantized weights or locations are not kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OWN = "holdfast"  # key of config.json for the run's values in an export
KEPT = ("bos_token_id", "pad_token_id", "dtype", "torch_dtype", "use_cache")  # keys of config.json
NOT_KEPT = ("auto_map", "_from_model_config", "name_or_path", "tokenizer_file")  # keys of the other documents


@dataclass(frozen=True)
class Base:
    """The documents of a base. Missing ones are empty."""

    config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    special_tokens_map: Mapping[str, Any] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)  # by name

    def documents(self, config: dict[str, Any], end_of_text: str, end_id: int) -> dict[str, dict[str, Any]]:
        """The JSON documents of an export with the config.json `config`."""
        documents = {"config.json": self._config(config, end_id)}
        settings = documents["config.json"]
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        fallback: dict[str, Any] = {key: settings[key] for key in ids if key in settings}
        generation = _kept(self.generation_config) or {**fallback, "do_sample": True}
        ends = generation.get("eos_token_id", settings["eos_token_id"])
        documents["generation_config.json"] = {**generation, "eos_token_id": _with_end(ends, end_id)}
        own = {
            "clean_up_tokenization_spaces": False,
            "model_max_length": settings["max_position_embeddings"],
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        special_tokens = _kept(self.special_tokens_map)
        tokens = {
            "eos_token": end_of_text,
            **{key: token for key, token in special_tokens.items() if key.endswith("_token")},
        }
        if not self.tokenizer_config and not self.config:
            tokens = {"bos_token": end_of_text, **tokens}
        tokenizer_fields = {key: value for key, value in _kept(self.tokenizer_config).items() if key != "chat_template"}
        if tokenizer_fields.get("eos_token") is None:
            tokenizer_fields.pop("eos_token", None)
        documents["tokenizer_config.json"] = {**own, **tokens, **tokenizer_fields}
        if len(self.templates) > 1 or (self.templates and "default" not in self.templates):
            several = [{"name": name, "template": text} for name, text in sorted(self.templates.items())]
            documents["tokenizer_config.json"]["chat_template"] = several
        if special_tokens:
            documents["special_tokens_map.json"] = special_tokens
        return documents

    def _config(self, config: dict[str, Any], end_id: int) -> dict[str, Any]:
        if not self.config:
            return config
        context = config["max_position_embeddings"]
        settings = {key: self.config[key] for key in KEPT if key in self.config}
        dtype = settings.get("dtype", settings.get("torch_dtype", config["dtype"]))
        merged = {
            **{key: value for key, value in config.items() if key != "bos_token_id"},
            **settings,
            "dtype": dtype,
            "torch_dtype": dtype,
            "eos_token_id": _with_end(self.config.get("eos_token_id"), end_id),
            OWN: {"context": context, "end_of_text_id": end_id},
        }
        longest = self.config.get("max_position_embeddings")
        if isinstance(longest, int):
            merged["max_position_embeddings"] = max(longest, context)
        return merged


def _with_end(ends: Any, end_id: int) -> Any:
    """The end tokens of a base with that of the run: unchanged if they contain it, otherwise with it first."""
    end_ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if end_id in end_ids:
        return ends
    return [end_id, *end_ids] if end_ids else end_id


def _kept(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in NOT_KEPT}
