"""Descriptions of loaded models."""

import dataclasses
import math
import os
from typing import Any

import numpy as np

from model_zoo.chat_model import ChatModel
from serve_app.config.options import recommended_options
from serve_app.messages.model_card import CardAdapter, ModelCard
from serve_app.replica.model_plan import ModelPlan


def model_card(plan: ModelPlan, name: str, *, reserved_bytes: int) -> ModelCard:
    """The description of a model, without arrays."""
    facts, files, on_host = plan.model.description, plan.files, plan.device.type == "cpu"
    manifest = None if files.stored is None else files.stored.manifest
    return ModelCard(
        name=name,
        architecture=facts.architecture,
        quantization=facts.quantization,
        parameter_count=facts.parameter_count,
        file_bytes=facts.file_bytes if manifest is None else manifest.size_bytes,
        digest=facts.digest if manifest is None else manifest.digest,
        modified_at=facts.modified_at if files.stored is None else files.stored.modified_at,
        context_length=facts.context_length,
        embedding_length=facts.embedding_length,
        chat_template=facts.chat_template,
        license=files.license or facts.license,
        context_tokens=plan.options.context_tokens,
        device=plan.device.type,
        reserved_bytes=reserved_bytes,
        device_bytes=0 if on_host else reserved_bytes,
        pid=os.getpid(),
        metadata={name: _scalar_or_none(value) for name, value in facts.metadata.items()},
        tensors=tuple((name, kind, tuple(shape)) for name, kind, shape in facts.tensors),
        system=files.prompt_defaults.system,
        messages=tuple((each.role, each.text) for each in files.prompt_defaults.messages),
        options=files.options.over(recommended_options(facts.metadata)),
        parameters=files.parameters,
        capabilities=_capabilities(plan.model),
        projector=None
        if facts.projector is None
        else {name: _scalar_or_none(value) for name, value in facts.projector.items()},
        adapters=tuple(CardAdapter(a.path.name, a.digest, a.scale) for a in facts.adapters),
    )


def verbose_card(card: ModelCard, model: ChatModel) -> ModelCard:
    """The card with the arrays of the metadata."""
    facts = model.description
    return dataclasses.replace(
        card,
        metadata={name: _plain(value) for name, value in facts.metadata.items()},
        projector=None
        if facts.projector is None
        else {name: _plain(value) for name, value in facts.projector.items()},
    )


def _capabilities(model: ChatModel) -> tuple[str, ...]:
    """The model's capabilities in Ollama's terms. Any decoder computes embeddings on request, but
    only embedding models list them. Rerankers, which Ollama does not have, compute no such
    vectors."""
    ranks = model.ranking is not None
    completes = model.decoder.generates and model.description.pooling is None
    chats = completes and model.template is not None
    holds = {
        "completion": completes,
        "vision": model.tower is not None,
        "tools": chats and model.calls_tools,
        "insert": completes and model.inserts,
        "thinking": chats and model.reply_format.thinks,
        "embedding": not ranks and (model.description.pooling is not None or not completes),
        "rerank": ranks,
    }
    return tuple(name for name, held in holds.items() if held)


def _scalar_or_none(value: Any) -> Any:
    """None for an array, which may be as long as the vocabulary."""
    return None if isinstance(value, np.ndarray | list | tuple) and len(value) else _plain(value)


def _plain(value: Any) -> Any:
    """The value as JSON types; None for infinity and NaN."""
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
