"""DeepSeek V2 to V3.2, their Lite and R1 models, GLM-4.7-Flash and GLM-5, Mistral Large 3 and Small
4, Youtu, and others of this architecture."""

from collections.abc import Sequence
from dataclasses import replace

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.draft_layers import without_draft_layers
from model_zoo.layers.indexer import Indexer, IndexerSizes, has_indexer
from model_zoo.layers.latent_attention import HEAD_KEYS, LatentAttention, LatentSizes
from model_zoo.layers.leading_dense import SIGMOID, SOFTMAX, leading_dense_or_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import log_scale, read_rotary
from model_zoo.layers.temperature import Temperature
from model_zoo.layers.text_sizes import MAX_HEAD_DIM, TextSizes
from runtime.kv.cache_kinds import Full

# A tenth of `mscale_all_dim`; converters divide by ten.
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
TEMPERATURE, TEMPERATURE_SPAN = "attention.temperature_scale", "attention.temperature_length"
# Of Mistral Small 4, the one model of its architecture; llama.cpp's converter does not state it.
_UNSTATED_TEMPERATURES = {"mistral4": 0.1}
# For each layer, whether it has an indexer.
_INDEXED = "attention.indexer.types"
_HALVED_INDEXERS = ("deepseek32",)
# Of Ollama's first files of GLM-4.7-Flash, in which the keys of both sizes are the other way round.
_SWAPPED = "glm4moelite"


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Latent attention; the leading layers are dense, the others have experts.

    Rotary pairs are interleaved, as in the authors' checkpoints. DeepSeek V3.2 and GLM-5 have
    indexers, which choose the tokens that a row attends to once it can see more than 2,048
    (`attention.indexer.top_k`). In a file without indexers, rows attend to all tokens.
    """
    sizes = without_draft_layers(w, TextSizes.read(metadata))
    rotary = _rotary(w, sizes)
    indexed = _indexed_layers(w, sizes)
    layers = [
        _layer(w.scope("blk", i), sizes, i, rotary, indexed=indexed) for i in range(sizes.layers)
    ]
    return Decoder(w, sizes, layers)


def _layer(
    w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary, *, indexed: Sequence[bool]
) -> TextLayer:
    """indexed: for each layer, whether it has an indexer."""
    keys = _head_keys(sizes.metadata)
    latent = LatentSizes.read(w, sizes.metadata, heads=sizes.heads[index], keys=keys)
    indexer = indexer_cache = None
    if indexed[index]:
        indexing = IndexerSizes.read(sizes.metadata, rotated=latent.rotated)
        indexer = _indexer(w.scope("indexer"), sizes, latent, indexing)
        indexer_cache = indexing.cache(Full())
    else:
        w.scope("indexer").ignore_all()
    attention = LatentAttention(
        w,
        latent,
        hidden=sizes.hidden,
        eps=sizes.eps,
        scale=_scale(sizes.metadata, latent.query),
        temperature=_temperature(sizes.metadata),
        indexer=indexer,
        shares_choice=any(indexed[:index]),
    )
    # The first files of GLM-4.7-Flash state no function; those of V2 have no bias.
    scores = SOFTMAX if w.shape("exp_probs_b.bias", whole=True) is None else SIGMOID
    feed_forward = leading_dense_or_experts(w, sizes, index, scores=scores)
    block = BlockOptions().read(w, sizes, attention, feed_forward)
    return TextLayer(
        block,
        latent.cache(Full()),
        rotary,
        rotated_from=latent.latent,
        beside=indexer_cache,
        beside_rotary=_indexer_rotary(sizes.metadata, rotary) if indexed[index] else None,
    )


def _indexer(
    w: TensorScope, sizes: TextSizes, latent: LatentSizes, indexing: IndexerSizes
) -> Indexer:
    if latent.query_rank is None:
        raise sizes.metadata.error(
            "attention.q_lora_rank", "is missing; indexers take compressed queries"
        )
    return Indexer(w, indexing, hidden=sizes.hidden, query_rank=latent.query_rank)


def _indexed_layers(w: TensorScope, sizes: TextSizes) -> tuple[bool, ...]:
    """For each layer, whether it has an indexer: as stated, in files that state nothing those with
    tensors of one. Later ones without share the choice of the last one before them."""
    metadata = sizes.metadata
    found = tuple(has_indexer(w.scope("blk", i, "indexer")) for i in range(sizes.layers))
    if not any(found) or not metadata.has(_INDEXED):
        return found
    stated = metadata.require_array(_INDEXED, bool)
    if len(stated) < sizes.layers or not stated[0]:
        raise metadata.error(_INDEXED, "leaves the first layer without an indexer, or later ones")
    return stated[: sizes.layers]


def _indexer_rotary(metadata: Metadata, rotary: Rotary) -> Rotary:
    """That of indexers, whose pairs are halves in DeepSeek V3.2 and interleaved in GLM-5."""
    halves = metadata.architecture in _HALVED_INDEXERS
    return replace(rotary, pairs=Pairs.NEOX) if halves else rotary


def _head_keys(metadata: Metadata) -> tuple[str, str]:
    """The keys of a head's sizes. In files with `attn_k_b`, `key_length` is the size of a cached
    row; in older files and in those of `_SWAPPED` it is the size of a head."""
    key, value = (
        mla if metadata.has(mla) and metadata.architecture != _SWAPPED else mla.removesuffix("_mla")
        for mla in HEAD_KEYS
    )
    return key, value


def _rotary(w: TensorScope, sizes: TextSizes) -> Rotary:
    """The rotary embedding. If the file states a multiplier of the scores, and not 0 as converters
    do without one, YaRN does not change the magnitude of queries and keys, because `mscale` equals
    `mscale_all_dim` in all models."""
    rotated = sizes.metadata.require_size("rope.dimension_count", at_most=MAX_HEAD_DIM)
    rotary = read_rotary(w, replace(sizes, key_dim=rotated), Pairs.INTERLEAVED)
    multiplied = sizes.metadata.get(LOG_MULTIPLIER, float, 0.0)
    return replace(rotary, magnitude=1.0) if multiplied else rotary


def _scale(metadata: Metadata, query: int) -> float:
    """The factor of scores, which with YaRN includes the square of its logarithmic term."""
    if metadata.get("rope.scaling.type", str) != "yarn":
        return query**-0.5
    weight = 10 * metadata.get(LOG_MULTIPLIER, float, 0.0)
    return query**-0.5 * log_scale(metadata.get_positive("rope.scaling.factor"), weight) ** 2


def _temperature(metadata: Metadata) -> Temperature | None:
    """The attention temperature of Mistral Large 3 and Small 4; a stated 0 means none."""
    unstated = _UNSTATED_TEMPERATURES.get(metadata.architecture, 0.0)
    if not metadata.get(TEMPERATURE, float, unstated):
        return None
    span = TEMPERATURE_SPAN
    span = span if metadata.has(span) else "rope.scaling.original_context_length"
    return Temperature(metadata.get_positive(TEMPERATURE, unstated), metadata.require_size(span))
