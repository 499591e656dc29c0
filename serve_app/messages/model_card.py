"""The description of a served model: a plain value that can be unpickled without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from serve_app.config.options import Options


@dataclass(frozen=True, slots=True)
class CardAdapter:
    """An adapter in use: the name of its file, a SHA-256 in hex of its header, its scale."""

    name: str
    digest: str
    scale: float


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Properties of the model's file, followed by those of its serving here.

    `digest` (hex SHA-256), `modified_at` (unix seconds) and `file_bytes` (all files) are those of
    the manifest if the model is in a store, otherwise of its file. `metadata`: arrays are None
    unless the card is verbose. `tensors`: name, type and shape in the order of the file.
    `reserved_bytes`: weights, cache and working memory; `device_bytes`: the part of them on an
    accelerator. `system`, `messages` (role and text of each) and `options`: defaults of requests.
    `parameters`: all options of the model by name, including those that are not served.
    `capabilities`: in Ollama's terms, such as "completion" and "embedding". `projector`: like
    `metadata`, of the projector file; None if the model has none.
    """

    name: str
    architecture: str
    quantization: str
    parameter_count: int
    file_bytes: int
    digest: str
    modified_at: float
    context_length: int
    embedding_length: int
    chat_template: str | None
    license: str | None
    context_tokens: int
    device: str
    reserved_bytes: int
    device_bytes: int
    pid: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    system: str | None = None
    messages: tuple[tuple[str, str], ...] = ()
    options: Options = field(default_factory=Options)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    capabilities: tuple[str, ...] = ("completion",)
    projector: Mapping[str, Any] | None = None
    adapters: tuple[CardAdapter, ...] = ()
