"""Mamba and Falcon Mamba: recurrent layers without attention and feed-forwards."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.block import MixerBlock
from model_zoo.layers.decoder import Decoder, TextLayer
from model_zoo.layers.mamba import Mamba, ScanSizes
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.text_sizes import TextSizes

# Of the norms of Falcon Mamba, as published; files do not state it.
SELECTION_EPS = 1e-6


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """In Falcon Mamba, steps, keys and queries have norms without weights; llama.cpp computes these
    with the epsilon of the other norms."""
    sizes, scan = TextSizes.read(metadata, attends=False), ScanSizes.read(metadata)
    normed = metadata.get("ssm.dt_b_c_rms", bool, False)
    norms = (RMSNorm(None, SELECTION_EPS),) * 3 if normed else ()
    layers = [_layer(w.scope("blk", i), sizes, scan, norms) for i in range(sizes.layers)]
    return Decoder(w, sizes, layers)


def _layer(
    w: TensorScope, sizes: TextSizes, scan: ScanSizes, norms: tuple[RMSNorm, ...]
) -> TextLayer:
    norm = w.rms_norm("attn_norm", sizes.eps, size=sizes.hidden)
    mixer = Mamba(w, hidden=sizes.hidden, sizes=scan, norms=norms)
    return TextLayer(MixerBlock(norm, mixer), scan.cache)
