"""Loads model files; the architecture in a file chooses the family that builds the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

from model_zoo.chat.template_choice import ChosenTemplate, choose_template, expect_template
from model_zoo.chat_model import AdapterFacts, ChatModel, ModelDescription
from model_zoo.families import TEXT_FAMILIES
from model_zoo.gguf.adapter import Adapter
from model_zoo.gguf.adapter_path import MAX_ADAPTERS, AdapterPath
from model_zoo.gguf.header import MetadataValue
from model_zoo.gguf.header_only_file import HeaderOnlyFile
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.pooling_types import NAMES, NONE, RANK, RANKING, pooling_type
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import ScopeOptions, TensorScope
from model_zoo.gguf.shared_weights import SharedWeights
from model_zoo.gguf.tensors import META, Progress
from model_zoo.gguf.tiled_copy import TilingOptions
from model_zoo.images.decode import DecodingLimits
from model_zoo.layers.embedding_head import EmbeddingHead
from model_zoo.layers.ranking_head import RankingHead
from model_zoo.multimodal.vision_loading import (
    PREFIXES,
    BuiltVision,
    VisionFile,
    build_vision,
    find_vision,
)
from model_zoo.tokenizers.pairs import PairFormat, pair_format
from model_zoo.tokenizers.tokenizer import Tokenizer, load_tokenizer
from runtime.distributed.layer_placement import LayerPlacement
from runtime.distributed.ranks import ALONE, Ranks
from runtime.errors import ModelFileError, UnsupportedModelError
from runtime.quant.weight import Compute
from runtime.worker.model import DecoderModel

_PER_TOKEN = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type"))

DecoderClass = Callable[[TensorScope, Metadata], DecoderModel]
Place = Callable[[Sequence[GGUFFile], DecoderModel], LayerPlacement | None]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a file is loaded, besides device and type.

    vision_device: the device of the vision model, None for that of the text model; on "meta" it has
    no weights and computes nothing.
    context_tokens: the longest sequence that will be served, None for the longest that the file
    allows; some models choose their rotary factors by it, and images are scaled down to it.
    progress(done, total): called with numbers of bytes read.
    image_limits: limits of decoded images.
    ranks: the ranks that divide the text model.
    place: computes the layer placement from the files, adapters included, and the model without
    weights; None or a result of None puts all layers on one device.
    read: False leaves the weights on disk, for a model on the CPU that only describes the file.
    adapters: applied to matrices of the text model, which stay as they are in its file.
    shared: copies of weights of models that are loaded already.
    compute: how activations enter products.
    deterministic: on CUDA devices, the bits of a row do not depend on other rows.
    tiling: where copies of weights in tiles are kept, for products on a CPU; None: products use the
    rows of the files.
    """

    vision_device: torch.device | None = None
    context_tokens: int | None = None
    progress: Progress | None = None
    image_limits: DecodingLimits = field(default_factory=DecodingLimits)
    ranks: Ranks = ALONE
    place: Place | None = None
    read: bool = True
    adapters: Sequence[AdapterPath] = ()
    shared: SharedWeights | None = None
    compute: Compute = Compute.EXACT
    deterministic: bool = False
    tiling: TilingOptions | None = None


def pooling_of(file: GGUFFile, metadata: Metadata) -> str | None:
    """As `ModelDescription.pooling`."""
    return NAMES.get(pooling_type(metadata, file.has))


def load(
    path: Path | str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    projector: Path | None = None,
    options: LoadOptions | None = None,
) -> ChatModel:
    """The model in a GGUF file, computing in `dtype` on `device`.

    projector: the file with its vision model, if separate.

    Raises ModelFileError for a missing, damaged or contradictory file, UnsupportedModelError for
    features that are not supported, ConfigurationError for a projector of another model.
    """
    options = options or LoadOptions()
    file = (GGUFFile if options.read else HeaderOnlyFile).open(path)
    metadata = Metadata(file.metadata, path=file.path)
    decoder_class = class_for(metadata)
    check_divisible(metadata, options.ranks)
    adapters = open_adapters(options.adapters, metadata, read=options.read)
    source = find_vision(file, metadata, projector)
    if source is not None and source.is_own and not options.read:
        source = replace(source, file=HeaderOnlyFile.open(source.file.path))
    tokenizer, chosen, pairs = _language(file, metadata)
    recipe = _Recipe(decoder_class, file, metadata, tokenizer, source, dtype, options, adapters)
    outline = recipe.check()
    if options.place is not None:
        files = [file, *(adapter.file for adapter in adapters)]
        recipe = replace(recipe, layer_placement=options.place(files, outline))
    parts = recipe.built(device, options.vision_device or device)
    vision = None
    if parts.vision is not None and source is not None:
        vision = build_vision(parts.vision, source, parts.decoder, options.image_limits)
    return ChatModel(
        parts.decoder,
        tokenizer,
        None if chosen is None else chosen.template,
        describe(file, metadata, parts.decoder, chosen, source, adapters),
        {} if chosen is None else chosen.alternatives,
        vision,
        ranking=parts.ranking,
        pairs=pairs,
        embedding_head=parts.embedding_head,
        for_tools=chosen is not None and chosen.for_tools,
    )


def open_adapters(
    sources: Sequence[AdapterPath], metadata: Metadata, *, read: bool = True
) -> tuple[Adapter, ...]:
    """The adapters of the model with this metadata; raises the errors of `Adapter.open`, and
    UnsupportedModelError for an adapter of another architecture."""
    if len(sources) > MAX_ADAPTERS:
        raise UnsupportedModelError(
            f"{metadata.path}: has {len(sources):,} adapters; the limit is {MAX_ADAPTERS}."
        )
    adapters = tuple(Adapter.open(source, read=read) for source in sources)
    for adapter in adapters:
        check_adapts(adapter, metadata)
    return adapters


def check_adapts(adapter: Adapter, metadata: Metadata) -> None:
    """UnsupportedModelError unless the adapter is for the architecture, under any of its names."""
    stated, wanted = adapter.architecture, metadata.architecture
    family = TEXT_FAMILIES.get(wanted)
    if stated != wanted and (family is None or TEXT_FAMILIES.get(stated) is not family):
        raise UnsupportedModelError(
            f"{adapter.file.path}: the adapter is for models of architecture {stated[:40]}; "
            f"{metadata.path} has the architecture {wanted}."
        )


def _language(
    file: GGUFFile, metadata: Metadata
) -> tuple[Tokenizer, ChosenTemplate | None, PairFormat | None]:
    """Tokenizer, chat template, and the format of pairs if the model ranks texts."""
    expect_template(file.metadata)  # starts its processes while the tokenizer is built
    try:
        tokenizer = load_tokenizer(token_metadata(file), architecture=metadata.architecture)
        chosen = choose_template(file.metadata, tokenizer, architecture=metadata.architecture)
        ranks = pooling_type(metadata, file.has) == RANK
        pairs = pair_format(tokenizer, file.metadata) if ranks else None
    except ModelFileError as error:
        raise type(error)(f"{file.path}: {error}") from error
    return tokenizer, chosen, pairs


def describe(
    file: GGUFFile,
    metadata: Metadata,
    decoder: DecoderModel,
    chosen: ChosenTemplate | None,
    vision: VisionFile | None = None,
    adapters: Sequence[Adapter] = (),
) -> ModelDescription:
    """The description of a loaded file."""
    tensors = file.tensors.values()
    own = vision.file if vision is not None and vision.is_own else None
    return ModelDescription(
        architecture=metadata.architecture,
        name=metadata.get("general.name", str, file.stem),
        quantization=file.quantization(metadata),
        parameter_count=_parameter_count(file),
        file_bytes=file.size_bytes,
        weight_bytes=decoder.weight_bytes,
        context_length=decoder.context_length,
        embedding_length=metadata.require_size("embedding_length"),
        vocab_size=decoder.vocab_size,
        metadata=file.metadata,
        tensors=tuple((info.name, info.type.name, info.shape[::-1]) for info in tensors),
        chat_template=None if chosen is None else chosen.template.source,
        template_source=None if chosen is None else chosen.origin,
        license=metadata.get("general.license", str),
        digest=file.digest,
        modified_at=file.modified_at,
        pooling=pooling_of(file, metadata),
        projector=None if own is None else _projector_facts(own),
        adapters=tuple(AdapterFacts(a.file.path, a.file.digest, a.scale) for a in adapters),
        matrix_bytes=sum(info.nbytes for info in tensors if len(info.shape) > 1),
    )


def _projector_facts(file: GGUFFile) -> dict[str, MetadataValue]:
    return {**file.metadata, "general.parameter_count": _parameter_count(file)}


def _parameter_count(file: GGUFFile) -> int:
    return sum(info.elements for info in file.tensors.values())


def class_for(metadata: Metadata) -> DecoderClass:
    """`build_decoder` of the file's family; UnsupportedModelError if there is none."""
    _check_is_text_model(metadata)
    name = metadata.architecture
    if name not in TEXT_FAMILIES:
        known = ", ".join(sorted(TEXT_FAMILIES))
        raise UnsupportedModelError(
            f"{metadata.path}: the architecture {name} is not supported; supported are: {known}."
        )
    return import_module(TEXT_FAMILIES[name].text).build_decoder


def build_text(
    decoder_class: DecoderClass, w: TensorScope, metadata: Metadata
) -> tuple[DecoderModel, RankingHead | None, EmbeddingHead | None]:
    """The text model and what follows its pooling; None for the heads that the file lacks.

    The heads are read first, so that the decoder's `weight_bytes`, which memory plans count,
    include them.
    """
    alone, ranking = w.undivided(), TEXT_FAMILIES[metadata.architecture].ranking
    heads = RankingHead.read(alone, metadata, ranking), EmbeddingHead.read(alone, metadata)
    return decoder_class(w, metadata), *heads


def check_divisible(metadata: Metadata, ranks: Ranks) -> None:
    """UnsupportedModelError if ranks cannot divide models of this architecture."""
    if ranks.size == 1 or TEXT_FAMILIES[metadata.architecture].tensor_parallel:
        return
    known = sorted(name for name, row in TEXT_FAMILIES.items() if row.tensor_parallel)
    raise UnsupportedModelError(
        f"{metadata.path}: models of architecture {metadata.architecture} cannot be divided among "
        f"{ranks.size} ranks (`parallel.tensor`); those that can: {', '.join(known)}."
    )


def _check_is_text_model(metadata: Metadata) -> None:
    kind = metadata.get("general.type", str, "model")
    pooling = metadata.get("pooling_type", int, NONE)
    reason = None
    if metadata.architecture == "clip" or kind in ("mmproj", "projector"):
        reason = "is the image projector of a model; name it as `projector` beside the text model"
    elif kind != "model":
        reason = f"has `general.type` {kind}; only whole models can be served"
    elif pooling == RANK and metadata.architecture not in RANKING:
        reason = (
            f"ranks texts (`pooling_type` {RANK}), which is served for these architectures "
            f"only: {', '.join(RANKING)}"
        )
    elif pooling != NONE and pooling not in NAMES:
        reason = f"has `{metadata.full_key('pooling_type')}` {pooling}, which is unknown"
    if reason is not None:
        raise UnsupportedModelError(f"{metadata.path}: {reason}.")


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """The parts of a model; None for those that it lacks."""

    decoder: DecoderModel
    ranking: RankingHead | None
    embedding_head: EmbeddingHead | None
    vision: BuiltVision | None


@dataclass(frozen=True, slots=True, eq=False)
class _Recipe:
    """A model file, possibly with a second file for the vision model, before weights are read."""

    decoder_class: DecoderClass
    file: GGUFFile
    metadata: Metadata
    tokenizer: Tokenizer
    vision: VisionFile | None
    dtype: torch.dtype
    options: LoadOptions
    adapters: Sequence[Adapter]
    layer_placement: LayerPlacement | None = None

    def check(self) -> DecoderModel:
        """Builds the model without data: a bad file is refused before gigabytes are read."""
        scopes = self._scopes((META, META), None)
        decoder = self._from(*scopes).decoder
        for scope in dict.fromkeys(scopes):
            scope.check()
        causal = decoder.causal
        if self.metadata.get("attention.causal", bool, causal) != causal:
            seen = "all tokens" if causal else "earlier tokens only"
            raise UnsupportedModelError(
                f"{self.metadata.path}: `{self.metadata.full_key('attention.causal')}` makes "
                f"tokens attend to {seen}, which models of architecture "
                f"{self.metadata.architecture} do not support."
            )
        return decoder

    def built(self, device: torch.device, vision_device: torch.device) -> _Parts:
        return self._from(*self._scopes((device, vision_device), self.options.progress))

    def _from(self, w: TensorScope, vision: TensorScope) -> _Parts:
        decoder, ranking, embedding_head = build_text(self.decoder_class, w, self.metadata)
        built = None
        if self.vision is not None:
            built = self.vision.build(vision.undivided(), self.tokenizer, decoder)
        return _Parts(decoder, ranking, embedding_head, built)

    def _scopes(
        self, devices: tuple[torch.device, torch.device], progress: Progress | None
    ) -> tuple[TensorScope, TensorScope]:
        """The scopes of the text model and of the vision model; they are the same scope if file
        and device are the same."""
        places, adapters = [(self.file, devices[0])], [self.adapters]
        if self.vision is not None and (self.vision.is_own or devices[0] != devices[1]):
            places.append((self.vision.file, devices[1]))
            adapters.append(())
        shares = _shares(progress, self._read_bytes(places))
        options = ScopeOptions(
            context_tokens=self.options.context_tokens,
            ranks=self.options.ranks,
            layer_placement=self.layer_placement,
            shared=self.options.shared,
            compute=self.options.compute,
            deterministic=self.options.deterministic,
        )
        tilings = [self.options.tiling, None]
        if self.vision is not None and self.vision.is_own:
            tilings[1] = self.options.tiling  # else it would copy a text model for a vision model
        scopes = [
            TensorScope(
                file,
                device=device,
                dtype=self.dtype,
                options=replace(options, progress=share, adapters=adapting, tiling=tiling),
            )
            for (file, device), share, adapting, tiling in zip(
                places, shares, adapters, tilings, strict=False
            )
        ]
        return scopes[0], scopes[-1]

    def _read_bytes(self, places: Sequence[tuple[GGUFFile, torch.device]]) -> list[int]:
        """Bytes to read for each scope; vision tensors of a combined file count for the second."""
        apart = len({id(file) for file, _ in places}) < len(places)
        sizes = []
        for second, (file, device) in enumerate(places):
            infos = () if device == META else file.tensors.values()
            own = (i for i in infos if not apart or i.name.startswith(PREFIXES) == bool(second))
            sizes.append(sum(info.nbytes for info in own))
        return sizes


def _shares(progress: Progress | None, sizes: Sequence[int]) -> list[Progress | None]:
    """Callbacks for files that are read one after the other; each reports progress over all of
    them."""
    if progress is None:
        return [None] * len(sizes)

    def share(before: int) -> Progress:
        return lambda done, _: progress(before + done, sum(sizes))

    return [share(sum(sizes[:index])) for index in range(len(sizes))]


def token_metadata(file: GGUFFile) -> Mapping[str, MetadataValue]:
    """The metadata without tokens beyond the rows of the embedding, which some files list.

    Such tokens cannot be computed; in Gemma 3 one of them is the image placeholder.
    """
    embedding = file.tensors.get("token_embd.weight")
    arrays = {key: file.metadata[key] for key in _PER_TOKEN if key in file.metadata}
    if embedding is None or len(embedding.shape) != 2:
        return file.metadata
    rows = embedding.shape[0]
    lists = (list, np.ndarray)
    cut = {key: array[:rows] for key, array in arrays.items() if isinstance(array, lists)}
    return {**file.metadata, **cut}
