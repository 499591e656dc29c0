"""Which class runs which architecture, and loading a model file with it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from gguf import LlamaFileType

from model_zoo.chat_model import ChatModel, ModelDescription
from model_zoo.eyes.loading import EyeFamily, EyeFile, find_eyes, opened
from model_zoo.eyes.parts import EyeParts
from model_zoo.gguf.header import MetadataValue
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import META, Progress, TensorScope
from model_zoo.images.decode import DecodingLimits
from model_zoo.template_choice import ChosenTemplate, choose_template
from model_zoo.tokenizer import Tokenizer, load_tokenizer
from runtime.errors import ModelFileError, UnsupportedModelError
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
        "qwen25vl": "model_zoo.architectures.qwen25vl:build_decoder",
        "qwen2vl": "model_zoo.architectures.qwen25vl:build_decoder",
        "qwen3": "model_zoo.architectures.qwen3:build_decoder",
        "qwen35": "model_zoo.architectures.qwen3next:build_decoder",
        "qwen35moe": "model_zoo.architectures.qwen3next:build_decoder",
        "qwen3moe": "model_zoo.architectures.qwen3moe:build_decoder",
        "qwen3next": "model_zoo.architectures.qwen3next:build_decoder",
        "qwen3vl": "model_zoo.architectures.qwen3vl:build_decoder",
        "qwen3vlmoe": "model_zoo.architectures.qwen3vl:build_decoder",
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
        "Qwen2_5_VLForConditionalGeneration": "model_zoo.architectures.qwen25vl:CONVERSION",
        "Qwen3ForCausalLM": "model_zoo.architectures.qwen3:CONVERSION",
        "Qwen3MoeForCausalLM": "model_zoo.architectures.qwen3moe:CONVERSION",
        "Qwen3NextForCausalLM": "model_zoo.architectures.qwen3next:CONVERSION",
        "Qwen3VLForConditionalGeneration": "model_zoo.architectures.qwen3vl:CONVERSION",
        "Qwen3VLMoeForConditionalGeneration": "model_zoo.architectures.qwen3vl:WITH_EXPERTS",
        "Qwen3_5ForCausalLM": "model_zoo.architectures.qwen3next:QWEN35",
        "Qwen3_5ForConditionalGeneration": "model_zoo.architectures.qwen3next:QWEN35",
        "Qwen3_5MoeForCausalLM": "model_zoo.architectures.qwen3next:QWEN35_MOE",
        "Qwen3_5MoeForConditionalGeneration": "model_zoo.architectures.qwen3next:QWEN35_MOE",
    }
)

# Of models put together from another family's text model: its `model_type` -> a name above.
TEXT_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
)
# The same names -> the table for the part that sees, where there is one.
VISION_CONVERSIONS: Mapping[str, str] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": "model_zoo.towers.gemma3:VISION",
        "Idefics3ForConditionalGeneration": "model_zoo.towers.idefics3:VISION",
        "InternVLForConditionalGeneration": "model_zoo.towers.internvl:VISION",
        "Llama4ForConditionalGeneration": "model_zoo.towers.llama4:VISION",
        "LlavaForConditionalGeneration": "model_zoo.towers.llava:VISION",
        "Mistral3ForConditionalGeneration": "model_zoo.towers.mistral3:VISION",
        "MllamaForConditionalGeneration": "model_zoo.towers.mllama:VISION",
        "Qwen2_5_VLForConditionalGeneration": "model_zoo.towers.qwen25vl:VISION",
        "Qwen3VLForConditionalGeneration": "model_zoo.towers.qwen3vl:VISION",
        "Qwen3VLMoeForConditionalGeneration": "model_zoo.towers.qwen3vl:VISION_OF_EXPERTS",
        "SmolVLMForConditionalGeneration": "model_zoo.towers.idefics3:VISION",
    }
)

_GEMMA3 = EyeFamily(("gemma3",), "model_zoo.eyes.gemma3:build_eyes")
_LLAMA4 = EyeFamily(("llama4",), "model_zoo.eyes.llama4:build_eyes")
_MLLAMA = EyeFamily(("mllama",), "model_zoo.eyes.mllama:build_eyes")
_PIXTRAL = EyeFamily(("mistral3", "llama"), "model_zoo.eyes.mistral3:build_eyes")
_QWEN25 = EyeFamily(("qwen25vl", "qwen2vl"), "model_zoo.eyes.qwen25vl:build_eyes")
_QWEN3 = EyeFamily(("qwen3vl", "qwen3vlmoe"), "model_zoo.eyes.qwen3vl:build_eyes")
# The type that a projector states, or the architecture of a file with all in one.
EYES: Mapping[str, EyeFamily] = MappingProxyType(
    {
        "gemma3": _GEMMA3,
        "llama4": _LLAMA4,
        "mistral3": _PIXTRAL,
        "mllama": _MLLAMA,
        "pixtral": _PIXTRAL,
        "qwen2.5vl_merger": _QWEN25,
        "qwen25vl": _QWEN25,
        "qwen3vl": _QWEN3,
        "qwen3vl_merger": _QWEN3,
        "qwen3vlmoe": _QWEN3,
    }
)

_PER_TOKEN = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type"))
# `pooling_type`: how an embedding model makes one vector of many.
_POOLINGS = MappingProxyType({1: "mean", 2: "cls", 3: "last"})
_NONE, _RANK = 0, 4
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
    image_limits: DecodingLimits | None = None,
) -> ChatModel:
    """The model in a GGUF file, computing in `dtype` on `device`.

    `projector`: the file with its eyes, where they are not in the same one; `image_limits`: of
    the images that are taken in. `context_tokens`: the longest sequence that will be served, None
    for what the file allows; some models compute otherwise where it is long.
    `progress(done, total)` hears of bytes read. ModelFileError when a file is missing, damaged
    or contradicts itself, UnsupportedModelError when it needs what is not served yet,
    ConfigurationError when the projector is not for this model.
    """
    file = GGUFFile.open(path)
    metadata = Metadata(file.metadata, path=file.path)
    decoder_class = class_for(metadata)
    source = find_eyes(file, metadata, projector, EYES)
    try:
        tokenizer = load_tokenizer(_token_metadata(file), architecture=metadata.architecture)
        chosen = choose_template(file.metadata, tokenizer, architecture=metadata.architecture)
    except ModelFileError as error:
        raise type(error)(f"{file.path}: {error}") from error
    recipe = _Recipe(decoder_class, file, metadata, tokenizer, source)
    recipe.check(dtype, context_tokens)
    decoder, parts = recipe.built(device, dtype, context_tokens, progress)
    eyes = None
    if parts is not None and source is not None:
        eyes = opened(parts, source, decoder, image_limits or DecodingLimits())
    return ChatModel(
        decoder,
        tokenizer,
        None if chosen is None else chosen.template,
        describe(file, metadata, decoder, chosen, source),
        {} if chosen is None else chosen.alternatives,
        eyes,
    )


def describe(
    file: GGUFFile,
    metadata: Metadata,
    decoder: DecoderModel,
    chosen: ChosenTemplate | None,
    eyes: EyeFile | None = None,
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
        sees=eyes is not None,
        projector=eyes.file.metadata if eyes is not None and eyes.is_own else None,
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
    pooling = metadata.get("pooling_type", int, _NONE)
    reason = None
    if metadata.architecture == "clip" or kind in ("mmproj", "projector"):
        reason = "is the image projector of a model; name it as `projector` beside the text model"
    elif kind != "model":
        reason = f"has `general.type` {kind}; only whole models can be served"
    elif pooling == _RANK:
        reason = "ranks texts (`pooling_type` 4), which is not served"
    elif pooling != _NONE and pooling not in _POOLINGS:
        reason = f"has `{metadata.full_key('pooling_type')}` {pooling}, which is not known"
    if reason is not None:
        raise UnsupportedModelError(f"{metadata.path}: {reason}.")


@dataclass(frozen=True, slots=True, eq=False)
class _Recipe:
    """What a model is built of: a file, and perhaps another with its eyes."""

    decoder_class: Callable[[TensorScope, Metadata], DecoderModel]
    file: GGUFFile
    metadata: Metadata
    tokenizer: Tokenizer
    eyes: EyeFile | None

    def check(self, dtype: torch.dtype, context_tokens: int | None) -> None:
        """Builds without data, so that a bad file is refused before gigabytes are read."""
        scopes = self._scopes(META, dtype, context_tokens, None)
        decoder, _ = self._from(*scopes)
        for scope in dict.fromkeys(scopes):
            scope.check()
        causal = decoder.causal
        if self.metadata.get("attention.causal", bool, causal) != causal:
            sees = "what comes after it" if causal else "what comes before it alone"
            raise UnsupportedModelError(
                f"{self.metadata.path}: `{self.metadata.full_key('attention.causal')}` says that a "
                f"token sees {sees}, which models of architecture {self.metadata.architecture} do "
                "not support."
            )

    def built(
        self,
        device: torch.device,
        dtype: torch.dtype,
        context_tokens: int | None,
        progress: Progress | None,
    ) -> tuple[DecoderModel, EyeParts | None]:
        return self._from(*self._scopes(device, dtype, context_tokens, progress))

    def _from(self, w: TensorScope, seeing: TensorScope) -> tuple[DecoderModel, EyeParts | None]:
        decoder = self.decoder_class(w, self.metadata)
        if self.eyes is None:
            return decoder, None
        return decoder, self.eyes.build(seeing, self.tokenizer, decoder)

    def _scopes(
        self,
        device: torch.device,
        dtype: torch.dtype,
        context_tokens: int | None,
        progress: Progress | None,
    ) -> tuple[TensorScope, TensorScope]:
        """Of the text model and of its eyes; one and the same where they are in one file."""
        files = [self.file]
        if self.eyes is not None and self.eyes.is_own:
            files.append(self.eyes.file)
        scopes = [
            TensorScope(
                file, device=device, dtype=dtype, context_tokens=context_tokens, progress=heard
            )
            for file, heard in zip(files, _shares(progress, files), strict=True)
        ]
        return scopes[0], scopes[-1]


def _shares(progress: Progress | None, files: Sequence[GGUFFile]) -> list[Progress | None]:
    """For files that are read one after the other: each tells how much of all is there."""
    if progress is None:
        return [None] * len(files)
    sizes = [sum(info.nbytes for info in file.tensors.values()) for file in files]

    def share(before: int) -> Progress:
        return lambda done, _: progress(before + done, sum(sizes))

    return [share(sum(sizes[:index])) for index in range(len(files))]


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
