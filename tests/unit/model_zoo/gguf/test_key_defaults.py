"""Defaults of missing keys are those of `transformers` for settings that a checkpoint lacks.

Each row of DEFAULTS has a key that some converter omits, or once did, and whose value is the same
in all models of the family. Other missing keys are errors, see `test_missing_keys.py`.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModel,
    Gemma2Config,
    Gemma3TextConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import TensorScope
from model_zoo.gguf.tensors import META
from model_zoo.registry import class_for
from runtime.engine.request import ImageSpan
from runtime.kv.cache_kinds import Full, Sliding
from runtime.worker.model import DecoderModel
from tests.families import image_rows
from tests.families.agreement import PROMPT, random_tokens
from tests.families.encoder_configs import ENCODERS
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import TEXT_MODELS
from tests.tiny_models import write_tiny

BASE, LOCAL_BASE = "rope.freq_base", "rope.freq_base_swa"
ORIGINAL = "rope.scaling.original_context_length"
EPSILON, LAYER_EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
WINDOW = "attention.sliding_window"
KEY_DIM, VALUE_DIM = "attention.key_length", "attention.value_length"
HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SHORT = {**HEADS, "intermediate_size": 96, "max_position_embeddings": 512}
SCALED = {"query_pre_attn_scalar": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


@dataclass(frozen=True)
class Default:
    """`source`: a class of `transformers` and the path to its value; None where `value` follows
    from `config`. `other`: a value with other results, to show that the key matters."""

    config: PreTrainedConfig
    key: str
    value: float
    other: float | None
    source: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


ENCODER = {"maker": AutoModel}
DEFAULTS = {
    "bert eps": Default(
        ENCODERS["bert"], LAYER_EPSILON, 1e-12, 1e-3,
        "BertConfig.layer_norm_eps", ENCODER,
    ),
    "nomic eps": Default(
        ENCODERS["nomic_bert"], LAYER_EPSILON, 1e-12, 1e-3,
        "NomicBertConfig.layer_norm_eps", ENCODER,
    ),
    "nomic base": Default(
        ENCODERS["nomic_bert"], BASE, 1000.0, 10_000.0,
        "NomicBertConfig.rope_parameters.rope_theta", ENCODER,
    ),
    "jina-bert-v3 eps": Default(
        ENCODERS["jina_bert_v3"], LAYER_EPSILON, 1e-5, 1e-3,
        "JinaEmbeddingsV3Config.layer_norm_eps", ENCODER,
    ),
    "jina-bert-v3 base": Default(
        ENCODERS["jina_bert_v3"], BASE, 20_000.0, 100.0,
        "JinaEmbeddingsV3Config.rope_parameters.rope_theta", ENCODER,
    ),
    "modern-bert eps": Default(
        ENCODERS["modern_bert"], LAYER_EPSILON, 1e-5, 1e-3, "ModernBertConfig.norm_eps", ENCODER
    ),
    "modern-bert local base": Default(
        ENCODERS["modern_bert"], LOCAL_BASE, 1e4, 100.0,
        "ModernBertConfig.rope_parameters.sliding_attention.rope_theta", ENCODER,
    ),
    "modern-bert base": Default(
        ENCODERS["modern_bert"], BASE, 1.6e5, 100.0,
        "ModernBertConfig.rope_parameters.full_attention.rope_theta", ENCODER,
    ),
    "modern-bert pattern": Default(
        ENCODERS["modern_bert"], "attention.sliding_window_pattern", 3, 2, None, ENCODER
    ),
    "gemma-embedding local base": Default(
        ENCODERS["gemma_embedding"], LOCAL_BASE, 1e4, 100.0,
        "Gemma3TextConfig.rope_parameters.sliding_attention.rope_theta", ENCODER,
    ),
    "gemma-embedding base": Default(
        ENCODERS["gemma_embedding"], BASE, 1e6, 100.0,
        "Gemma3TextConfig.rope_parameters.full_attention.rope_theta", ENCODER,
    ),
    "gemma-embedding eps": Default(
        ENCODERS["gemma_embedding"], EPSILON, 1e-6, 1e-3, "Gemma3TextConfig.rms_norm_eps", ENCODER
    ),
    "llama eps": Default(
        TEXT_MODELS["mistral"].config(), EPSILON, 1e-6, 1e-3, "LlamaConfig.rms_norm_eps"
    ),
    "llama base": Default(
        TEXT_MODELS["mistral"].config(), BASE, 1e4, 1e6, "LlamaConfig.rope_parameters.rope_theta"
    ),
    "mixtral base": Default(
        TEXT_MODELS["mixtral"].config(), BASE, 1e6, 1e4, "MixtralConfig.rope_parameters.rope_theta"
    ),
    "gemma base": Default(
        TEXT_MODELS["gemma"].config(), BASE, 1e4, 1e6, "GemmaConfig.rope_parameters.rope_theta"
    ),
    "gemma2 base": Default(
        TEXT_MODELS["gemma2"].config(), BASE, 1e4, 1e6, "Gemma2Config.rope_parameters.rope_theta"
    ),
    "gemma2 window": Default(
        TEXT_MODELS["gemma2"].config(), WINDOW, 4096, 16, "Gemma2Config.sliding_window"
    ),
    "gemma2 cap of scores": Default(
        TEXT_MODELS["gemma2"].config(), "attn_logit_softcapping", 50.0, 2.0,
        "Gemma2Config.attn_logit_softcapping",
    ),
    "gemma2 cap of logits": Default(
        TEXT_MODELS["gemma2"].config(), "final_logit_softcapping", 30.0, 3.0,
        "Gemma2Config.final_logit_softcapping",
    ),
    "phi3 base": Default(
        TEXT_MODELS["phi3"].config(), BASE, 1e4, 1e6, "Phi3Config.rope_parameters.rope_theta"
    ),
    "gpt-oss eps": Default(
        TEXT_MODELS["gpt-oss"].config(), EPSILON, 1e-5, 1e-3, "GptOssConfig.rms_norm_eps"
    ),
    "gpt-oss window": Default(
        TEXT_MODELS["gpt-oss"].config(), WINDOW, 128, 16, "GptOssConfig.sliding_window"
    ),
    "gpt-oss base": Default(
        TEXT_MODELS["gpt-oss"].config(), BASE, 150_000.0, 1e4,
        "GptOssConfig.rope_parameters.rope_theta",
    ),
    "gpt-oss original context": Default(
        TEXT_MODELS["gpt-oss"].config(), ORIGINAL, 4096, 512,
        "GptOssConfig.rope_parameters.original_max_position_embeddings",
    ),
    "llama4 base": Default(
        TEXT_MODELS["llama4"].config(), BASE, 500_000.0, 1e4,
        "Llama4TextConfig.rope_parameters.rope_theta",
    ),
    "mllama eps": Default(
        image_rows.tiny_config(), EPSILON, 1e-5, 1e-3,
        "MllamaTextConfig.rms_norm_eps", image_rows.OPTIONS,
    ),
    "mllama base": Default(
        image_rows.tiny_config(), BASE, 500_000.0, 1e4,
        "MllamaTextConfig.rope_parameters.rope_theta", image_rows.OPTIONS,
    ),
    "mimo2 scale of values": Default(
        TEXT_MODELS["mimo2"].config(), "attention.value_scale", 0.707, 1.0,
        "MiMoV2FlashConfig.attention_value_scale",
    ),
    "mistral4 temperature": Default(
        TEXT_MODELS["mistral4"].config(), "attention.temperature_scale", 0.1, 0.0,
        "Mistral4Config.rope_parameters.llama_4_scaling_beta",
    ),
    "mistral4 span of temperatures": Default(
        TEXT_MODELS["mistral4"].config(), "attention.temperature_length", 32, 8,
    ),
    "paddleocr base": Default(
        TEXT_MODELS["paddleocr"].config(), BASE, 500_000.0, 1e4,
        "PaddleOCRTextConfig.rope_parameters.rope_theta",
    ),
    "qwen2.5-vl base": Default(
        TEXT_MODELS["qwen25vl"].config(), BASE, 1e6, 1e4,
        "Qwen2_5_VLTextConfig.rope_parameters.rope_theta",
    ),
    "ministral original context": Default(
        TEXT_MODELS["mistral3"].config(), ORIGINAL, 16_384, 32,
        "Ministral3Config.rope_parameters.original_max_position_embeddings",
    ),
    "qwen2 original context": Default(
        Qwen2Config(**SHORT, rope_parameters={**YARN, "original_max_position_embeddings": 64}),
        ORIGINAL, 512, 64,
    ),
    "qwen3 original context": Default(TEXT_MODELS["qwen3"].config("yarn"), ORIGINAL, 512, 64),
    "width of qwen3-next's shared expert": Default(
        TEXT_MODELS["qwen3next"].config(), "expert_shared_feed_forward_length", 48, None
    ),
    "width of qwen3.5's shared expert": Default(
        TEXT_MODELS["qwen35moe"].config(), "expert_shared_feed_forward_length", 48, None
    ),
}  # fmt: skip
# Head sizes that are not hidden / heads; those of the largest Gemma models differ.
HEAD_DIMS = {
    "gemma2": (Gemma2Config(**SHORT, num_hidden_layers=2, head_dim=256), 256),
    "gemma2 27b": (Gemma2Config(**SHORT, num_hidden_layers=46, head_dim=128, **SCALED), 128),
    "gemma3": (Gemma3TextConfig(**SHORT, num_hidden_layers=2, head_dim=256), 256),
    "gemma3 27b": (Gemma3TextConfig(**SHORT, num_hidden_layers=62, head_dim=128, **SCALED), 128),
    "qwen3": (Qwen3Config(**SHORT, num_hidden_layers=2), 128),
    "qwen3next": (TEXT_MODELS["qwen3next"].config(head_dim=256), 256),
}


def source_of(path: str) -> Any:
    name, *steps = path.split(".")
    value = getattr(transformers, name)()
    for step in steps:
        value = value[step] if isinstance(value, dict) else getattr(value, step)
    return value


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> Callable[..., GGUFFile]:
    """A function that writes the tiny model of a configuration once and opens the file."""
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, GGUFFile] = {}

    def get(config: PreTrainedConfig, **options: Any) -> GGUFFile:
        key = repr((type(config), config.to_dict(), options))
        if key not in made:
            path: Path = folder / f"{len(made)}.gguf"
            write_tiny(path, config, **options)
            made[key] = GGUFFile.open(path)
        return made[key]

    return get


def built(file: GGUFFile, keys: Mapping[str, Any], *, outline: bool = False) -> DecoderModel:
    """The model with changed keys, given without the architecture; None removes a key."""
    prefix = file.metadata["general.architecture"]
    changed = copy.copy(file)
    values = {**file.metadata, **{f"{prefix}.{key}": value for key, value in keys.items()}}
    changed.metadata = {key: value for key, value in values.items() if value is not None}
    device = META if outline else torch.device("cpu")
    scope = TensorScope(changed, device=device, dtype=torch.float32)
    metadata = Metadata(changed.metadata, path=changed.path)
    decoder = class_for(metadata)(scope, metadata)
    scope.check()
    return decoder


def results(decoder: DecoderModel) -> Tensor:
    """Logits, or the hidden states of an encoder."""
    tokens = random_tokens(PROMPT, seed=30)
    paged = PagedDecoder(decoder)
    if not decoder.causal:
        whole = ImageSpan(0, len(tokens), whole=True, digest=b"")
        paged.show(0, [(whole, torch.empty(0, 0))])
    return paged.feed({0: tokens}) if decoder.generates else paged.states({0: tokens})


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_missing_key_has_the_value_of_its_family(opened, name) -> None:
    row = DEFAULTS[name]
    if row.source is not None:
        assert source_of(row.source) == row.value
    file = opened(row.config, **row.options)
    silent = results(built(file, {row.key: None}))
    assert torch.equal(silent, results(built(file, {row.key: row.value})))
    if row.other is not None:
        assert not torch.equal(silent, results(built(file, {row.key: row.other})))


@pytest.mark.parametrize("name", HEAD_DIMS)
def test_missing_head_sizes_are_those_of_the_family(opened, name) -> None:
    config, dim = HEAD_DIMS[name]
    missing = {KEY_DIM: None, VALUE_DIM: None}
    decoder = built(opened(config), missing, outline=True)
    attending = [cache for cache in decoder.cache_layers if isinstance(cache.kind, Full | Sliding)]
    assert {(cache.key_dim, cache.value_dim) for cache in attending} == {(dim, dim)}


@pytest.mark.parametrize(
    "layers, context, window",
    [(32, 4096, 2047), (40, 4096, 2047), (32, 131_072, None), (40, 16_384, None), (2, 4096, None)],
)
def test_phi_3_models_of_4096_tokens_have_a_window_by_default(
    opened, layers, context, window
) -> None:
    """Phi-3-mini-4k and Phi-3-medium-4k; not the models with longer contexts, nor Phi 4."""
    config = Phi3Config(
        **(SHORT | {"max_position_embeddings": context}), num_hidden_layers=layers,
        original_max_position_embeddings=context,
    )  # fmt: skip
    file = opened(config)
    kind = Full() if window is None else Sliding(window)
    assert "phi3.attention.sliding_window" not in file.metadata
    assert {cache.kind for cache in built(file, {}, outline=True).cache_layers} == {kind}
    stated = built(file, {WINDOW: 0}, outline=True)
    assert {cache.kind for cache in stated.cache_layers} == {Full()}


def test_a_rotation_wider_than_a_head_as_ollama_writes_it_covers_the_head(opened, tmp_path) -> None:
    """Ollama's converter writes hidden / heads: 160 for Mistral Nemo, whose head size is 128."""
    config = MistralConfig(**SHORT, head_dim=8, sliding_window=None)
    file = opened(config)
    slip = built(file, {"rope.dimension_count": 16})
    assert torch.equal(results(slip), results(built(file, {})))
