"""PaddleOCR-VL: the text model, ERNIE 4.5 with rotation by time, row and column."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.attention_layer import attention_layer
from model_zoo.layers.decoder import Decoder, uniform_decoder
from model_zoo.layers.rope import Pairs
from model_zoo.layers.text_sizes import TextSizes

# Values of all models, as in PaddleOCRTextConfig of `transformers`.
SECTIONS, BASE = (16, 24, 24), 500_000.0


def build_decoder(w: TensorScope, metadata: Metadata) -> Decoder:
    """Sections are consecutive, and unlike ERNIE's, pairs are dimensions of both halves."""
    sizes = TextSizes.read(metadata)
    return uniform_decoder(
        w,
        sizes,
        Pairs.NEOX,
        attention_layer,
        dim=sizes.key_dim,
        default_base=BASE,
        sections=SECTIONS,
    )
