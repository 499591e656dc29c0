"""List entries of models that are not loaded, from manifests and file headers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_zoo.chat.formats.reply_format import format_of, has_answers
from model_zoo.chat.template_language import as_jinja
from model_zoo.families import only_embeds
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.model_headers import ModelHeaders
from model_zoo.gguf.pooling_types import NONE, RANK, keeps_token_vectors, pooling_type
from model_zoo.store.store import StoredModel
from model_zoo.tokenizers.infill import INFILL_KEYS
from runtime.errors import CaravanError, ModelFileError
from serve_app.config.options import Options, recommended_options
from serve_app.config.settings import ModelSettings
from serve_app.messages.listing import ListedModel
from serve_app.replica.model_files import local_files


def listed_file(
    name: str,
    path: Path,
    *,
    has_projector: bool,
    options: Options,
    stored: StoredModel | None,
    template: str | None = None,
) -> ListedModel:
    """The list entry of a model file. Raises ModelFileError if it is damaged.

    `has_projector`: whether the model has a projector file. `options`: those that the model has
    besides its file, which override the file's. `template`: likewise.
    """
    file = ModelHeaders.open(path)
    metadata = Metadata(file.metadata, path=file.path)
    manifest = None if stored is None else stored.manifest
    return ListedModel(
        name=name,
        digest=file.digest if manifest is None else manifest.digest,
        file_bytes=file.size_bytes if manifest is None else manifest.size_bytes,
        modified_at=file.modified_at if stored is None else stored.modified_at,
        architecture=metadata.architecture,
        quantization=file.quantization(metadata),
        parameter_count=sum(info.elements for info in file.tensors.values()),
        context_length=metadata.get("context_length", int, 0),
        embedding_length=metadata.get("embedding_length", int, 0),
        capabilities=capabilities_of(file, metadata, template, has_projector=has_projector),
        options=options.over(recommended_options(file.metadata)),
    )


def listed_model(settings: ModelSettings, environment: Mapping[str, str]) -> ListedModel | None:
    """The list entry of a configured model; None if its files are missing here or damaged."""
    try:
        origin = local_files(settings, environment)
        if origin is None:
            return None
        return listed_file(
            settings.name,
            origin.path,
            has_projector=origin.projector is not None,
            options=origin.options,
            stored=origin.stored,
            template=origin.template,
        )
    except CaravanError:
        return None


def capabilities_of(
    file: ModelHeaders, metadata: Metadata, own_template: str | None, *, has_projector: bool
) -> tuple[str, ...]:
    """The capabilities that the loaded model will report, except that an unsupported vision model
    counts as supported, that infill tokens without keys are not found, and that a template that
    mentions tools counts as showing them. None for a model with a vector for each token, which
    cannot be loaded. `own_template`: as `template` of `listed_file`."""
    if keeps_token_vectors(metadata, file.has):
        return ()
    own = _jinja(own_template)
    encodes = only_embeds(metadata.architecture) or not metadata.get("attention.causal", bool, True)
    pooling = pooling_type(metadata, file.has)
    embeds, ranks = encodes or pooling != NONE, pooling == RANK
    template = metadata.get("tokenizer.chat_template", str, "")
    named = metadata.get("tokenizer.chat_template.tool_use", str, template)
    for_tools = own is None and metadata.has("tokenizer.chat_template.tool_use")
    replies = format_of(own or (named if has_answers(named) else template))
    infill = any(metadata.has(f"tokenizer.ggml.{key}") for key in INFILL_KEYS)
    inserts = infill or (own is not None and ".Suffix" in (own_template or ""))
    found: dict[str, Any] = {
        "completion": not embeds,
        "vision": has_projector or metadata.has("vision.block_count"),
        "tools": not embeds and (replies.tools or for_tools),
        "insert": not embeds and inserts,
        "thinking": not embeds and replies.thinks,
        "embedding": embeds and not ranks,
        "rerank": ranks,
    }
    return tuple(name for name, holds in found.items() if holds)


def _jinja(template: str | None) -> str | None:
    """The template in Jinja; None if it cannot be converted and will not be used."""
    try:
        return None if template is None else as_jinja(template)
    except ModelFileError:
        return None
