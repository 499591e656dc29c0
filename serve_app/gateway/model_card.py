"""What clients may know of a served model: a plain value that needs no tensor library to read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from serve_app.config.options import Options


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The file's facts, then how this application serves it.

    `digest` hex SHA-256, `modified_at` unix seconds: of the store's manifest, with `file_bytes` of
    all that belongs to it, where the model is in a store; else of its file. `metadata` holds None
    for arrays unless they were asked for. `tensors`: name, type and shape in the file's order.
    `reserved_bytes`: weights, cache and working memory; `device_bytes`: the part of them on an
    accelerator. `system`, `messages` (role and text of each) and `options`: what conversations
    begin with, and what requests get that bring none of their own. `parameters`: all options that
    the model brings by name, with those that are not served. `capabilities`: in Ollama's
    words, such as "completion" and "embedding". `projector`: like `metadata`, of the file with its
    vision model, where that is one of its own.
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
