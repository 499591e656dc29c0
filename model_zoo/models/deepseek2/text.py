"""DeepSeek V2 to V3.2, their Lite and R1 models, GLM-4.7-Flash and GLM-5, Mistral Large 3 and Small
4, Youtu, and others of this architecture."""

from dataclasses import replace

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.draft_layers import without_draft_layers
from model_zoo.layers.latent_attention import HEAD_KEYS, LatentAttention, LatentSizes
from model_zoo.layers.leading_dense import SIGMOID, SOFTMAX, leading_dense_or_experts
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import log_scale, read_rotary
from model_zoo.layers.temperature import Temperature
from model_zoo.layers.text_sizes import MAX_HEAD_DIM, TextSizes
from runtime.kv.spec import Full

# A tenth of `mscale_all_dim`; converters divide by ten.
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
TEMPERATURE, TEMPERATURE_SPAN = "attention.temperature_scale", "attention.temperature_length"
# Of Mistral Small 4, the one model of its architecture; llama.cpp's converter does not state it.
_UNSTATED_TEMPERATURES = {"mistral4": 0.1}
# Of Ollama's first files of GLM-4.7-Flash, in which the keys of both sizes are the other way round.
_SWAPPED = "glm4moelite"


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Latent attention; the leading layers are dense, the others have experts.

    Rotary pairs are interleaved, as in the authors' checkpoints. DeepSeek V3.2 and GLM-5 have an
    indexer, which chooses the tokens that a row attends to once it can see more than 2,048
    (`attention.indexer.top_k`). Here rows attend to all of them, and indexers are not loaded.
    """
    sizes = without_draft_layers(w, TextSizes.read(metadata))
    rotary = _rotary(w, sizes)
    layers = [_layer(w.scope("blk", i), sizes, i, rotary) for i in range(sizes.layers)]
    return Decoder(w, sizes, layers)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    w.scope("indexer").ignore_all()
    keys = _head_keys(sizes.metadata)
    latent = LatentSizes.read(w, sizes.metadata, heads=sizes.heads[index], keys=keys)
    attention = LatentAttention(
        w,
        latent,
        hidden=sizes.hidden,
        eps=sizes.eps,
        scale=_scale(sizes.metadata, latent.query),
        temperature=_temperature(sizes.metadata),
    )
    # The first files of GLM-4.7-Flash state no function; those of V2 have no bias.
    scores = SOFTMAX if w.shape("exp_probs_b.bias", whole=True) is None else SIGMOID
    feed_forward = leading_dense_or_experts(w, sizes, index, scores=scores)
    block = BlockOptions().read(w, sizes, attention, feed_forward)
    return TextLayer(block, latent.cache(Full()), rotary, rotated_from=latent.latent)


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
