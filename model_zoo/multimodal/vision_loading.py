"""Finds the file with a model's vision model, builds it, and checks that it fits the text model."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from pathlib import Path

from model_zoo.families import FAMILIES, VISION_FAMILIES, Family
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.decode import DecodingLimits
from model_zoo.multimodal.image_settings import projector_type
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.multimodal.vision_model import VisionModel
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.errors import ConfigurationError, ModelFileError, UnsupportedModelError
from runtime.kv.cache_kinds import Cross
from runtime.worker.model import DecoderModel

Builder = Callable[[TensorScope, Metadata, Tokenizer], MultimodalSpec]
PREFIXES = ("v.", "vision.", "mm.", "resampler.", "s.")
# Bytes of each tensor that enter the name of a vision model: different checkpoints differ in all
# tensors.
SAMPLED_BYTES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class BuiltVision:
    """The parts of a vision model. `weight_bytes`: of its tensors."""

    parts: MultimodalSpec
    weight_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class VisionFile:
    """The file with the vision model for the text model in `beside`, which may be the same file."""

    file: GGUFFile
    metadata: Metadata
    beside: GGUFFile
    family: Family

    @property
    def is_own(self) -> bool:
        return self.file is not self.beside

    def build(self, w: TensorScope, tokenizer: Tokenizer, decoder: DecoderModel) -> BuiltVision:
        """Builds the vision model from `w`, a scope of this file. ConfigurationError if it does not
        fit the text model."""
        build: Builder = import_module(self.family.multimodal).build_multimodal
        before = w.loaded_bytes
        try:
            parts = build(_served(w, decoder), self.metadata, tokenizer)
        except ModelFileError as error:
            if str(self.file.path) in str(error):
                raise
            raise type(error)(f"{self.beside.path}: {error}") from error
        self._check(parts, decoder)
        return BuiltVision(parts, w.loaded_bytes - before)

    def _check(self, parts: MultimodalSpec, decoder: DecoderModel) -> None:
        limits, expected = parts.tower.limits, parts.depth * decoder.hidden_size
        if limits.width != expected:
            raise _misfit(
                self.file,
                self.beside,
                f"its rows of features are {limits.width:,} wide, those of the text model "
                f"{expected:,}",
            )
        # The last layer computes only the rows that are sampled, so no features can be added to it.
        # In all models with features for several layers, each layer has one cache.
        layers = len(decoder.cache_layers)
        if parts.depth > layers:
            raise _misfit(
                self.file,
                self.beside,
                f"it has features for the first {parts.depth - 1:,} layers of a text model with at "
                f"least {parts.depth:,}, and this one has {layers:,}",
            )
        if parts.uses_grids and decoder.position_axes == 1:
            raise _misfit(
                self.file,
                self.beside,
                "it needs a text model that rotates by rows and columns of images, and the file of "
                "this one states no rope sections for them; convert the text model again",
            )
        if parts.processor.most_rows > limits.rows:
            raise ModelFileError(
                f"{self.file.path}: an image may have {parts.processor.most_rows:,} rows of "
                f"features, but the vision model supports at most {limits.rows:,}."
            )


def find_vision(file: GGUFFile, metadata: Metadata, projector: Path | None) -> VisionFile | None:
    """The vision model of the text model in `file`; None if it has none."""
    inside = any(name.startswith(PREFIXES) for name in file.tensors)
    if projector is None:
        family = VISION_FAMILIES.get(metadata.architecture)
        return VisionFile(file, metadata, file, family) if inside and family is not None else None
    if not any(metadata.architecture in family.vision_of for family in FAMILIES):
        raise ConfigurationError(
            f"`projector` is {projector}, but models of architecture {metadata.architecture} "
            "do not support images; remove it."
        )
    if inside:
        raise ConfigurationError(
            f"`projector` is {projector}, but {file.path} contains a vision model; remove it."
        )
    return _projector(GGUFFile.open(projector), file, metadata)


def _projector(own: GGUFFile, file: GGUFFile, metadata: Metadata) -> VisionFile:
    stated = Metadata(own.metadata, path=own.path)
    if stated.architecture != "clip":
        raise ConfigurationError(
            f"{own.path} is not a projector: it contains a model of architecture "
            f"{stated.architecture}."
        )
    kind = projector_type(stated)
    if not stated.get("has_vision_encoder", bool, True):
        raise UnsupportedModelError(f"{own.path} does not support images, only other media.")
    if kind not in VISION_FAMILIES:
        known = ", ".join(sorted(VISION_FAMILIES))
        raise UnsupportedModelError(
            f"{own.path}: projectors of type {kind[:80]} are not supported; supported are: {known}."
        )
    family = VISION_FAMILIES[kind]
    if metadata.architecture not in family.vision_of:
        expected = " or ".join(family.vision_of)
        raise _misfit(
            own,
            file,
            f"type {kind} is for models of architecture {expected}, not {metadata.architecture}",
        )
    return VisionFile(own, stated, file, family)


def _served(w: TensorScope, decoder: DecoderModel) -> TensorScope:
    """The same scope for the context that is served: no longer one than the text model supports."""
    served = copy(w)
    if w.context_tokens is not None:
        served.context_tokens = min(w.context_tokens, decoder.context_length)
    return served


def build_vision(
    built: BuiltVision, source: VisionFile, decoder: DecoderModel, limits: DecodingLimits
) -> VisionModel:
    """The vision model from its parts. `limits`: limits of image files."""
    parts = built.parts
    crosses = [layer.kind for layer in decoder.cache_layers if isinstance(layer.kind, Cross)]
    return VisionModel(
        parts.tower,
        built.weight_bytes,
        parts.processor,
        parts.placeholders,
        _name(source.file),
        limits,
        min((kind.most_images for kind in crosses), default=None),
    )


def _name(file: GGUFFile) -> bytes:
    """A digest of the header and the first bytes of each tensor, so that little is read."""
    name = blake2b(bytes.fromhex(file.digest), digest_size=32)
    for tensor in file.tensors:
        if tensor.startswith(PREFIXES):
            name.update(file.weight(tensor).data.flatten()[:SAMPLED_BYTES].numpy().tobytes())
    return name.digest()


def _misfit(projector: GGUFFile, text: GGUFFile, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"The projector {projector.path} does not fit the model {text.path}: {why}."
    )
