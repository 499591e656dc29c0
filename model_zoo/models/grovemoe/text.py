"""GroveMoE: Qwen 3 with experts, groups of which share a smaller one."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import head_norms
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.experts import ChunkExperts, ExpertOptions, Experts, ExpertSizes
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.text_sizes import TextSizes


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """The shared experts compute from the input of the others, as in the authors' code; those of
    llama.cpp compute from the others' results."""
    return uniform_decoder(w, TextSizes.read(metadata), Pairs.NEOX, _layer)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    metadata, counts = sizes.metadata, ExpertSizes.read(sizes.metadata)
    options = ExpertOptions(chunks=_chunks(metadata, counts.count))
    experts = Experts(w, sizes.hidden, counts, options)
    return attention_layer(
        w, sizes, index, rotary, attention=head_norms(w, sizes), feed_forward=experts
    )


def _chunks(metadata: Metadata, experts: int) -> ChunkExperts:
    key = "experts_per_group"
    per_group = metadata.require_size(key, at_most=experts)
    if experts % per_group:
        raise metadata.error(key, f"is {per_group}, which does not divide {experts} experts")
    return ChunkExperts(
        per_group,
        metadata.require_size("expert_chunk_feed_forward_length"),
        metadata.get_positive("expert_group_scale"),
    )
