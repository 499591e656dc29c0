"""Layers that predict further tokens for drafts, which some files have beside the others."""

from dataclasses import replace

from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.text_sizes import TextSizes

_KEY = "nextn_predict_layers"
_OF_OLLAMA = "mtp"  # prefix of these layers in files of its former converter, which state no number


def without_draft_layers(w: TensorScope, sizes: TextSizes) -> TextSizes:
    """The sizes without the draft layers at the end (`nextn_predict_layers`); ModelFileError if no
    other layers remain. Tensors of draft layers are not loaded."""
    drafting = sizes.metadata.get(_KEY, int, 0)
    if not 0 <= drafting < sizes.layers:
        raise sizes.metadata.error(
            _KEY, f"is {drafting:,}; it must be below the {sizes.layers:,} layers"
        )
    for layer in range(sizes.layers - drafting, sizes.layers):
        w.scope("blk", layer).ignore_all()
    w.scope(_OF_OLLAMA).ignore_all()
    return replace(sizes, layers=sizes.layers - drafting)
