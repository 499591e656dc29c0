"""Which class runs which architecture, and loading a model file with it."""

from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

import torch
from gguf import LlamaFileType

from model_zoo.chat_model import ChatModel, ModelDescription
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import META, Progress, TensorScope
from model_zoo.template_choice import ChosenTemplate, choose_template
from model_zoo.tokenizer import load_tokenizer
from runtime.errors import ConfigurationError, ModelFileError, UnsupportedModelError
from runtime.model import DecoderModel

# `general.architecture` -> "module:Class"; the module is imported when a file needs it.
ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "model_zoo.architectures.llama:Llama",
    }
)

_FILE_TYPES = {
    kind.value: kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")
    for kind in LlamaFileType
    if kind is not LlamaFileType.GUESSED
}


def load(
    path: Path | str,
    *,
    projector: Path | None = None,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> ChatModel:
    """The model in a GGUF file, computing in `dtype` on `device`.

    `progress(done, total)` hears of bytes read. ModelFileError when the file is missing, damaged
    or contradicts itself, UnsupportedModelError when it needs what is not served yet.
    """
    file = GGUFFile.open(path)
    metadata = Metadata(file.metadata, path=file.path)
    decoder_class = _decoder_class(metadata)
    if projector is not None:
        raise ConfigurationError(
            f"`projector` is {projector}, but models of architecture {metadata.architecture} "
            "see no images; remove it."
        )
    try:
        tokenizer = load_tokenizer(file.metadata, architecture=metadata.architecture)
        chosen = choose_template(file.metadata, tokenizer, architecture=metadata.architecture)
    except ModelFileError as error:
        raise type(error)(f"{file.path}: {error}") from error
    decoder = _decoder(decoder_class, file, metadata, device, dtype, progress)
    return ChatModel(
        decoder,
        tokenizer,
        None if chosen is None else chosen.template,
        describe(file, metadata, decoder, chosen),
        {} if chosen is None else chosen.alternatives,
    )


def describe(
    file: GGUFFile, metadata: Metadata, decoder: DecoderModel, chosen: ChosenTemplate | None
) -> ModelDescription:
    """What is told about a loaded file."""
    tensors = file.tensors.values()
    return ModelDescription(
        architecture=metadata.architecture,
        name=metadata.get("general.name", str, file.stem),
        quantization=_quantization(file, metadata),
        parameter_count=sum(info.elements for info in tensors),
        file_bytes=file.size_bytes,
        weight_bytes=decoder.weight_bytes,
        context_length=decoder.context_length,
        embedding_length=metadata.require_size("embedding_length"),
        vocab_size=decoder.vocab_size,
        block_count=metadata.require_size("block_count"),
        metadata=file.metadata,
        tensors=tuple((info.name, info.type.name, info.shape[::-1]) for info in tensors),
        chat_template=None if chosen is None else chosen.template.source,
        template_source=None if chosen is None else chosen.origin,
        license=metadata.get("general.license", str),
        digest=file.digest,
        modified_at=file.modified_at,
    )


def _decoder_class(metadata: Metadata) -> Callable[[TensorScope, Metadata], DecoderModel]:
    _refuse_what_is_no_chat_model(metadata)
    name = metadata.architecture
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(
            f"{metadata.path}: the architecture {name} is not supported; supported are: {known}."
        )
    module, _, attribute = ARCHITECTURES[name].partition(":")
    return getattr(import_module(module), attribute)


def _refuse_what_is_no_chat_model(metadata: Metadata) -> None:
    kind = metadata.get("general.type", str, "model")
    reason = None
    if metadata.architecture == "clip" or kind in ("mmproj", "projector"):
        reason = "is the image projector of a model; name it as `projector` beside the text model"
    elif kind != "model":
        reason = f"has `general.type` {kind}; only whole models can be served"
    elif metadata.has("pooling_type"):
        reason = "is an embedding model (`pooling_type`); it writes no text"
    if reason is not None:
        raise UnsupportedModelError(f"{metadata.path}: {reason}.")


def _decoder(
    decoder_class: Callable[[TensorScope, Metadata], DecoderModel],
    file: GGUFFile,
    metadata: Metadata,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
) -> DecoderModel:
    """Built without data first, so that a bad file is refused before gigabytes are read."""
    draft = TensorScope(file, device=META, dtype=dtype)
    decoder_class(draft, metadata)
    draft.check()
    return decoder_class(TensorScope(file, device=device, dtype=dtype, progress=progress), metadata)


def _quantization(file: GGUFFile, metadata: Metadata) -> str:
    """What the file calls itself, or else the type of most of its weights."""
    stated = _FILE_TYPES.get(metadata.get("general.file_type", int, -1))
    if stated is not None:
        return stated
    elements: Counter[str] = Counter()
    for info in file.tensors.values():
        elements[info.type.name] += info.elements
    return elements.most_common(1)[0][0] if elements else "unknown"
