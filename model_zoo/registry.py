"""Which class runs which architecture, and loading a model file with it."""

from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from gguf import LlamaFileType

from model_zoo.chat_model import ChatModel, ModelDescription
from model_zoo.gguf.header import MetadataValue
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import META, Progress, TensorScope
from model_zoo.template_choice import ChosenTemplate, choose_template
from model_zoo.tokenizer import load_tokenizer
from runtime.errors import ConfigurationError, ModelFileError, UnsupportedModelError
from runtime.model import DecoderModel

# `general.architecture` -> "module:function"; the module is imported when a file needs it.
ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "bert": "model_zoo.architectures.bert:build_decoder",
        "gemma2": "model_zoo.architectures.gemma2:build_decoder",
        "gemma3": "model_zoo.architectures.gemma3:build_decoder",
        "gemma3n": "model_zoo.architectures.gemma3n:build_decoder",
        "gemma4": "model_zoo.architectures.gemma4:build_decoder",
        "gpt-oss": "model_zoo.architectures.gptoss:build_decoder",
        "gptoss": "model_zoo.architectures.gptoss:build_decoder",
        "llama": "model_zoo.architectures.llama:build_decoder",
        "llama4": "model_zoo.architectures.llama4:build_decoder",
        "mllama": "model_zoo.architectures.mllama:build_decoder",
        "mistral3": "model_zoo.architectures.mistral3:build_decoder",
        "nomic-bert": "model_zoo.architectures.nomic_bert:build_decoder",
        "phi3": "model_zoo.architectures.phi3:build_decoder",
        "qwen2": "model_zoo.architectures.qwen2:build_decoder",
        "qwen3": "model_zoo.architectures.qwen3:build_decoder",
        "qwen3moe": "model_zoo.architectures.qwen3moe:build_decoder",
    }
)

# Names in the `architectures` of a config.json -> "module:TABLE" that makes GGUF of it.
CONVERSIONS: Mapping[str, str] = MappingProxyType(
    {
        "BertForMaskedLM": "model_zoo.architectures.bert:CONVERSION",
        "BertModel": "model_zoo.architectures.bert:CONVERSION",
        "Gemma2ForCausalLM": "model_zoo.architectures.gemma2:CONVERSION",
        "Gemma3ForCausalLM": "model_zoo.architectures.gemma3:CONVERSION",
        "Gemma3ForConditionalGeneration": "model_zoo.architectures.gemma3:CONVERSION",
        "Gemma3nForCausalLM": "model_zoo.architectures.gemma3n:CONVERSION",
        "Gemma3nForConditionalGeneration": "model_zoo.architectures.gemma3n:CONVERSION",
        "Gemma4ForCausalLM": "model_zoo.architectures.gemma4:CONVERSION",
        "Gemma4ForConditionalGeneration": "model_zoo.architectures.gemma4:CONVERSION",
        "Gemma4UnifiedForCausalLM": "model_zoo.architectures.gemma4:UNIFIED",
        "Gemma4UnifiedForConditionalGeneration": "model_zoo.architectures.gemma4:UNIFIED",
        "GptOssForCausalLM": "model_zoo.architectures.gptoss:CONVERSION",
        "Llama4ForCausalLM": "model_zoo.architectures.llama4:CONVERSION",
        "Llama4ForConditionalGeneration": "model_zoo.architectures.llama4:CONVERSION",
        "LlamaForCausalLM": "model_zoo.architectures.llama:CONVERSION",
        "Ministral3ForCausalLM": "model_zoo.architectures.mistral3:CONVERSION",
        "Mistral3ForConditionalGeneration": "model_zoo.architectures.mistral3:CONVERSION",
        "MistralForCausalLM": "model_zoo.architectures.llama:CONVERSION",
        "MixtralForCausalLM": "model_zoo.architectures.llama:MIXTRAL",
        "MllamaForCausalLM": "model_zoo.architectures.mllama:CONVERSION",
        "MllamaForConditionalGeneration": "model_zoo.architectures.mllama:CONVERSION",
        "NomicBertModel": "model_zoo.architectures.nomic_bert:CONVERSION",
        "Phi3ForCausalLM": "model_zoo.architectures.phi3:CONVERSION",
        "Qwen2ForCausalLM": "model_zoo.architectures.qwen2:CONVERSION",
        "Qwen3ForCausalLM": "model_zoo.architectures.qwen3:CONVERSION",
        "Qwen3MoeForCausalLM": "model_zoo.architectures.qwen3moe:CONVERSION",
    }
)

_PER_TOKEN = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type"))
# `pooling_type`: how an embedding model makes one vector of many.
_POOLINGS = MappingProxyType({1: "mean", 2: "cls", 3: "last"})
_RANK = 4
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
    context_tokens: int | None = None,
    progress: Progress | None = None,
) -> ChatModel:
    """The model in a GGUF file, computing in `dtype` on `device`.

    `context_tokens`: the longest sequence that will be served, None for what the file allows; some
    models compute otherwise where it is long. `progress(done, total)` hears of bytes read.
    ModelFileError when the file is missing, damaged
    or contradicts itself, UnsupportedModelError when it needs what is not served yet.
    """
    file = GGUFFile.open(path)
    metadata = Metadata(file.metadata, path=file.path)
    decoder_class = class_for(metadata)
    if projector is not None:
        raise ConfigurationError(
            f"`projector` is {projector}, but models of architecture {metadata.architecture} "
            "see no images; remove it."
        )
    try:
        tokenizer = load_tokenizer(_token_metadata(file), architecture=metadata.architecture)
        chosen = choose_template(file.metadata, tokenizer, architecture=metadata.architecture)
    except ModelFileError as error:
        raise type(error)(f"{file.path}: {error}") from error
    w = TensorScope(
        file, device=device, dtype=dtype, context_tokens=context_tokens, progress=progress
    )
    decoder = _decoder(decoder_class, file, metadata, w)
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
        quantization=quantization(file, metadata),
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
        pooling=_POOLINGS.get(metadata.get("pooling_type", int, 0)),
    )


def class_for(metadata: Metadata) -> Callable[[TensorScope, Metadata], DecoderModel]:
    """The class that runs such a file; UnsupportedModelError when there is none."""
    _refuse_what_is_no_text_model(metadata)
    name = metadata.architecture
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(
            f"{metadata.path}: the architecture {name} is not supported; supported are: {known}."
        )
    module, _, attribute = ARCHITECTURES[name].partition(":")
    return getattr(import_module(module), attribute)


def _refuse_what_is_no_text_model(metadata: Metadata) -> None:
    kind = metadata.get("general.type", str, "model")
    reason = None
    if metadata.architecture == "clip" or kind in ("mmproj", "projector"):
        reason = "is the image projector of a model; name it as `projector` beside the text model"
    elif kind != "model":
        reason = f"has `general.type` {kind}; only whole models can be served"
    elif metadata.get("pooling_type", int, 0) == _RANK:
        reason = "ranks texts (`pooling_type` 4), which is not served"
    if reason is not None:
        raise UnsupportedModelError(f"{metadata.path}: {reason}.")


def _decoder(
    decoder_class: Callable[[TensorScope, Metadata], DecoderModel],
    file: GGUFFile,
    metadata: Metadata,
    w: TensorScope,
) -> DecoderModel:
    """Built without data first, so that a bad file is refused before gigabytes are read."""
    draft = TensorScope(file, device=META, dtype=w.dtype, context_tokens=w.context_tokens)
    decoder_class(draft, metadata)
    draft.check()
    return decoder_class(w, metadata)


def _token_metadata(file: GGUFFile) -> Mapping[str, MetadataValue]:
    """The metadata without the tokens beyond the embedding's rows, which some files list.

    Nothing can be computed of such a token; in Gemma 3's it stands for a place in an image.
    """
    embedding = file.tensors.get("token_embd.weight")
    arrays = {key: file.metadata[key] for key in _PER_TOKEN if key in file.metadata}
    if embedding is None or len(embedding.shape) != 2:
        return file.metadata
    rows = embedding.shape[0]
    lists = (list, np.ndarray)
    cut = {key: array[:rows] for key, array in arrays.items() if isinstance(array, lists)}
    return {**file.metadata, **cut}


def quantization(file: GGUFFile, metadata: Metadata) -> str:
    """What the file calls itself, or else the type of most of its weights."""
    stated = _FILE_TYPES.get(metadata.get("general.file_type", int, -1))
    if stated is not None:
        return stated
    elements: Counter[str] = Counter()
    for info in file.tensors.values():
        elements[info.type.name] += info.elements
    return elements.most_common(1)[0][0] if elements else "unknown"
