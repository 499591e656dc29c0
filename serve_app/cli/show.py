"""`caravan show`: facts about a model, and the memory that it needs."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from model_zoo.chat.template_language import as_jinja
from model_zoo.gguf.header import MetadataValue
from model_zoo.sources.resolve import resolve_stored
from model_zoo.store.store import Store
from runtime.errors import CaravanError, ModelFileError
from serve_app.cli.completion import stored_models
from serve_app.cli.model_facts import LocatedModel, ModelFacts, locate, tensor_list, texts_of
from serve_app.cli.serving_memory import ServingMemory, serving_memory
from serve_app.cli.shared_options import json_option, store_option
from serve_app.cli.terminal import (
    byte_size,
    harmless_lines,
    iso_date,
    local_date,
    print_json,
    print_pairs,
    print_table,
    print_title,
    short_count,
    shortened,
)
from serve_app.config.options import served_options
from serve_app.replica.file_headers import capabilities_of
from serve_app.replica.model_files import ModelFiles

_LONGEST_VALUE = 80
_LONGEST_REASON = 400
_SHOWN_ELEMENTS = 4


@click.command(
    "show",
    epilog="""\b
Examples:
  caravan show llama3.2:1b
  caravan show models/demo.gguf --context 8192 --slots 4
""",
)
@click.argument("model", metavar="NAME|PATH|SOURCE", shell_complete=stored_models)
@click.option(
    "--context",
    "context_tokens",
    type=click.IntRange(min=2),
    metavar="TOKENS",
    help="Maximum of prompt and answer together; default: num_ctx of the model, or 4096, "
    "limited to its trained context.",
)
@click.option("--slots", type=click.IntRange(min=1), help="Concurrent requests; default: 16.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    help="Device to serve on; default: CUDA if this machine has it, else the CPU.",
)
@click.option(
    "--projector",
    type=click.Path(path_type=Path),
    help="Separate file with the vision model.",
)
@click.option("--draft", metavar="NAME|PATH|SOURCE", help="Draft model for speculation.")
@store_option
@json_option
def show(
    model: str,
    projector: Path | None,
    draft: str | None,
    context_tokens: int | None,
    slots: int | None,
    device: str,
    store: Store,
    as_json: bool,
) -> None:
    """Show facts about a model and the memory that it needs.

    Only the headers of its files are read. --context, --slots, --device, --projector and --draft
    have the meaning of `context_tokens`, `max_sequences`, `device`, `projector` and
    `speculation.draft` in a configuration. --json writes all metadata and every tensor.
    """
    location = locate(model, store)
    if projector is not None:
        location = replace(location, projector=projector)
    if draft is not None:
        location = replace(location, draft=locate(draft, store).file)
    facts = ModelFacts(location.file)
    try:
        need: ServingMemory | CaravanError = serving_memory(
            _files(location, store, projector_required=projector is not None),
            context_tokens=context_tokens,
            slots=slots,
            device=device,
        )
    except CaravanError as error:
        need = error
    document = _document(location, facts, need, store)
    if as_json:
        print_json(document)
    else:
        _print(document, facts, need)


def _files(location: LocatedModel, store: Store, *, projector_required: bool) -> ModelFiles:
    return ModelFiles(
        location.file,
        projector=location.projector,
        projector_required=projector_required,
        context_tokens=_own_context(location, store),
        adapters=location.adapters,
        draft=location.draft,
    )


def _own_context(location: LocatedModel, store: Store) -> int | None:
    """`num_ctx` of a stored model's parameters, None if absent or invalid."""
    try:
        parameters = (
            {} if location.stored is None else resolve_stored(location.stored, store).parameters
        )
    except CaravanError:
        return None
    options, _ = served_options({"num_ctx": parameters.get("num_ctx")})
    return options.num_ctx


def _document(
    location: LocatedModel, facts: ModelFacts, need: ServingMemory | CaravanError, store: Store
) -> dict[str, Any]:
    stored = location.stored
    refusal = facts.unserved or (str(need) if isinstance(need, CaravanError) else None)
    return {
        "name": facts.name,
        "architecture": facts.architecture,
        "parameters": facts.parameter_count,
        "quantization": facts.quantization,
        "context_length": facts.size("context_length"),
        "embedding_length": facts.size("embedding_length"),
        "block_count": facts.size("block_count"),
        "vocab_size": facts.vocab_size,
        "license": facts.license,
        "capabilities": _capabilities(location, facts, store),
        "path": str(location.file),
        "file_bytes": facts.file.size_bytes,
        "modified_at": iso_date(facts.file.modified_at),
        "stored": None if stored is None else _stored(location, store),
        "projector": None if location.projector is None else _file(location.projector),
        "draft": None if location.draft is None else _file(location.draft),
        "adapters": [{"path": str(a.path), "scale": a.scale} for a in location.adapters],
        "supported": refusal is None,
        "unsupported_because": refusal,
        "memory": {"error": str(need)} if isinstance(need, CaravanError) else asdict(need),
        "template": asdict(facts.template),
        "tensor_types": [
            {
                "type": total.type.name,
                "tensors": total.tensors,
                "parameters": total.elements,
                "bytes": total.nbytes,
            }
            for total in facts.totals()
        ],
        "metadata": facts.file.metadata,
        "tensors": tensor_list(facts.file),
    }


def _capabilities(location: LocatedModel, facts: ModelFacts, store: Store) -> list[str]:
    """Those of the model once it is served; none if it cannot be, or its files are damaged."""
    if facts.unserved:
        return []
    stored, sees = location.stored, location.projector is not None
    try:
        own = None if stored is None else resolve_stored(stored, store).served_template
        return list(capabilities_of(facts.file, facts.metadata, own, has_projector=sees))
    except CaravanError:
        return []


def _stored(location: LocatedModel, store: Store) -> dict[str, Any]:
    stored = location.stored
    assert stored is not None
    return {
        "name": str(stored.name),
        "bytes": stored.manifest.size_bytes,
        "modified_at": iso_date(stored.modified_at),
        "annotations": stored.manifest.annotations,
        "files": [str(path) for path in stored.files],
        "layers": [
            {"kind": layer.kind, "digest": layer.digest, "bytes": layer.size}
            for layer in stored.manifest.blobs
        ],
        "texts": {
            kind: texts_of(stored, store, kind)
            for kind in ("license", "system", "template", "params", "messages")
        },
    }


def _file(path: Path) -> dict[str, Any]:
    """Facts of a projector or a draft model, or the error of a damaged one."""
    try:
        facts = ModelFacts(path)
    except CaravanError as error:
        return {"path": str(path), "error": str(error)}
    return {
        "path": str(path),
        "architecture": facts.architecture,
        "parameters": facts.parameter_count,
        "quantization": facts.quantization,
        "file_bytes": facts.file.size_bytes,
    }


def _print(
    document: Mapping[str, Any], facts: ModelFacts, need: ServingMemory | CaravanError
) -> None:
    print_title(shortened(facts.name, _LONGEST_VALUE))
    print_pairs(_summary(document, facts))
    if isinstance(need, ServingMemory):
        click.echo()
        print_title(_memory_title(need))
        print_pairs(_memory(need))
    click.echo()
    print_table(
        ("tensors>", "type", "parameters>", "size>"),
        (
            (f"{total.tensors:,}", total.type.name, f"{total.elements:,}", byte_size(total.nbytes))
            for total in facts.totals()
        ),
    )
    click.echo()
    print_title("Metadata")
    print_pairs((key, _value(value)) for key, value in facts.file.metadata.items())
    if facts.template.source is not None:
        click.echo()
        print_title(f"Chat template ({facts.template.origin})")
        for line in harmless_lines(facts.template.source):
            click.echo(f"  {line}")


def _summary(document: Mapping[str, Any], facts: ModelFacts) -> Iterator[tuple[str, str]]:
    yield "architecture", facts.architecture
    yield "parameters", f"{short_count(facts.parameter_count)} ({facts.parameter_count:,})"
    yield "quantisation", facts.quantization
    for name, key in (
        ("context", "context_length"),
        ("embedding", "embedding_length"),
        ("layers", "block_count"),
        ("vocabulary", "vocab_size"),
    ):
        if document[key] is not None:
            yield name, f"{document[key]:,}"
    yield "licence", _license(document)
    yield "file", str(document["path"])
    size, modified_at = byte_size(facts.file.size_bytes), local_date(facts.file.modified_at)
    yield "size", f"{size}, written {modified_at}"
    if document["stored"] is not None:
        yield from _stored_pairs(document["stored"])
    yield "projector", _file_line(document, "projector")
    if document["draft"] is not None:
        yield "draft model", _file_line(document, "draft")
    for adapter in document["adapters"]:
        yield "adapter", f"{adapter['path']}, scale {adapter['scale']:g}"
    yield "capabilities", ", ".join(document["capabilities"]) or "unknown"
    yield "chat template", facts.template.origin or "none: raw prompts only"
    reason = document["unsupported_because"]
    yield "served", "yes" if reason is None else f"no: {shortened(reason, _LONGEST_REASON)}"


def _stored_pairs(stored: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "stored as", f"{stored['name']}, {byte_size(stored['bytes'])}"
    for name, kind in (("system prompt", "system"), ("options", "params")):
        for text in stored["texts"][kind]:
            yield name, shortened(text, _LONGEST_VALUE)
    if stored["texts"]["template"]:
        yield "own template", _template_use(stored["texts"]["template"][-1])


def _template_use(template: str) -> str:
    try:
        as_jinja(template)
    except ModelFileError as error:
        return shortened(f"not used: {error}", _LONGEST_REASON)
    return "used instead of the file's"


def _license(document: Mapping[str, Any]) -> str:
    texts = document["stored"]["texts"]["license"] if document["stored"] else []
    first = next((line.strip() for text in texts for line in text.split("\n") if line.strip()), "")
    return shortened(document["license"] or first or "not stated", _LONGEST_VALUE)


def _file_line(document: Mapping[str, Any], key: str) -> str:
    file = document[key]
    if file is None:
        return "none"
    unused = file.get("error") or document["memory"].get(f"{key}_left_alone")
    if unused is not None:
        return shortened(unused, _LONGEST_REASON)
    size = byte_size(file["file_bytes"])
    return f"{file['path']}, {file['architecture']}, {file['quantization']}, {size}"


def _memory_title(need: ServingMemory) -> str:
    requests = "one request" if need.slots == 1 else f"{need.slots} concurrent requests"
    return f"Memory on {need.device}, for {requests} of {need.context_tokens:,} tokens"


def _memory(need: ServingMemory) -> Iterator[tuple[str, str]]:
    yield "weights", _weights(need)
    yield "KV cache", f"{byte_size(need.cache_bytes)} in {need.kv_dtype}"
    yield "activations", byte_size(need.activation_bytes)
    if need.vision_bytes:
        yield "images", f"{byte_size(need.vision_bytes)}, to encode them and for their features"
    yield "sampling", byte_size(need.sampler_bytes)
    if need.draft_bytes:
        yield "draft model", f"{byte_size(need.draft_bytes)}, its cache included"
    yield "total", byte_size(need.total_bytes)
    yield "minimum", f"{byte_size(need.least_bytes)}, with a cache for one request"
    if need.whole_context_cache_bytes is not None:
        size, most = byte_size(need.whole_context_cache_bytes), need.whole_context_tokens
        yield "whole context", f"a KV cache of {size} for one request of {most:,} tokens"
    if need.available_bytes is not None:
        yield "available here", f"{byte_size(need.available_bytes)}; {_verdict(need)}"


def _weights(need: ServingMemory) -> str:
    size = byte_size(need.weight_bytes)
    vision = need.vision_weight_bytes
    return f"{size}, {byte_size(vision)} of them for vision" if vision else size


def _verdict(need: ServingMemory) -> str:
    if need.cache_tokens is None:
        return f"it does not fit. {need.refusal}"
    return f"it fits, with a cache of {need.cache_tokens:,} tokens"


def _value(value: MetadataValue) -> str:
    """One line; long arrays and texts are shortened, with their length."""
    if isinstance(value, list | np.ndarray):
        shown = ", ".join(_element(element) for element in value[:_SHOWN_ELEMENTS])
        more = f", … ({len(value):,} elements)" if len(value) > _SHOWN_ELEMENTS else ""
        return f"[{shown}{more}]"
    if isinstance(value, str) and len(value) > _LONGEST_VALUE:
        return f"{shortened(value, _LONGEST_VALUE)} ({len(value):,} characters)"
    return str(value)


def _element(element: Any) -> str:
    if isinstance(element, str):
        return json.dumps(shortened(element, 20), ensure_ascii=False)
    return str(element.item() if isinstance(element, np.generic) else element)
