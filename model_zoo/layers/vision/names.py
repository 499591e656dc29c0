"""Tensor names of vision models, which differ by converter."""

from dataclasses import dataclass

from torch import Tensor

from model_zoo.gguf.scope import TensorScope

# Alternative names of a tensor; llama.cpp's is the first.
Names = tuple[str, ...]


def known_as(w: TensorScope, *names: str) -> str:
    """The first of these names that the file has; if it has none of them, the first name."""
    return next((name for name in names if w.has(name)), names[0])


def first_table(w: TensorScope, *names: str, shape: tuple[int, ...]) -> Tensor:
    """The first of these tensors that the file has, as float32; names include the suffix.

    Leading dimensions of size 1 are removed.
    """
    name = next((name for name in names if w.shape(name, whole=True)), names[0])
    stored = w.shape(name, whole=True) or shape
    ahead = len(stored) - len(shape)
    if ahead > 0 and stored[:ahead] == (1,) * ahead:
        return w.table(name, shape=(*stored[:ahead], *shape)).flatten(0, ahead)
    return w.table(name, shape=shape)


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of a layer's tensors, besides `attn_q`, `attn_k` and `attn_v`; whole: of the one that
    may have the rows of these three."""

    attn_norm: Names = ("ln1",)
    whole: Names = ("attn_qkv",)
    output: Names = ("attn_out",)
    ffn_norm: Names = ("ln2",)
    up: Names = ("ffn_up",)
    down: Names = ("ffn_down",)
