"""GLM-3, GLM-4 and GLM-Edge; GLM-4 0414 and the text models of GLM-4.1V and GLM-OCR, which have
norms after attention and feed-forward as well. Half of each head or all of it is rotated."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention import AttentionOptions
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.block import BlockOptions
from model_zoo.layers.decoder import Decoder, TextLayer, uniform_decoder
from model_zoo.layers.draft_layers import without_draft_layers
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_sections import stated_sections
from model_zoo.layers.text_sizes import TextSizes

OLLAMA_BLOCK = BlockOptions(
    post_norms=True, post_attention_norm="post_attn_norm", post_ffw_norm="post_ffn_norm"
)
OLDER = "chatglm"  # the architecture without norms after attention and feed-forward


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """`rope.dimension_count` states how much of a head is rotated.

    Rotary pairs are interleaved, except in files of vision models, which converters identify by
    sections of time, rows and columns (M-RoPE): they permute the rows of their queries and keys.
    """
    sizes = without_draft_layers(w, TextSizes.read(metadata))
    sections = stated_sections(metadata)
    pairs = Pairs.NEOX if sections else Pairs.INTERLEAVED
    return uniform_decoder(w, sizes, pairs, _layer, sections=sections)


def _layer(w: TensorScope, sizes: TextSizes, index: int, rotary: Rotary) -> TextLayer:
    """Ollama's files of GLM-OCR have other names, and two matrices for gate and up."""
    ollama = w.has("attn_out")
    whole = None if ollama else "ffn_up"
    feed_forward = GatedFeedForward(
        w, hidden=sizes.hidden, size=sizes.feed_forward[index], whole=whole
    )
    norms_after = sizes.metadata.architecture != OLDER
    return attention_layer(
        w,
        sizes,
        index,
        rotary,
        attention=AttentionOptions(output="attn_out") if ollama else None,
        feed_forward=feed_forward,
        block=OLLAMA_BLOCK if ollama else BlockOptions(post_norms=norms_after),
    )
