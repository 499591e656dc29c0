"""Norms and rotations of heads before attention, and the write to the cache."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from runtime.kernels.attention import write_cache
from runtime.kernels.pointwise import rms_norm, rope_halves, rope_interleaved
from runtime.kernels.triton.launch import has_kernels
from runtime.worker.model import AttentionPlan, LayerPages


class HeadNorm(Protocol):
    """An RMS norm of each head; weight [dim], None for ones."""

    @property
    def weight(self) -> Tensor | None: ...

    @property
    def eps(self) -> float: ...


class HeadRotation(Protocol):
    """The rotary angles of a step's rows; see `rope_halves` and `rope_interleaved`."""

    @property
    def cos(self) -> Tensor: ...

    @property
    def sin(self) -> Tensor: ...

    @property
    def halves(self) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """`query`, `key`, `value`: norms before the rotation; `rotated_query`, `rotated_key`: norms
    after it."""

    query: HeadNorm | None = None
    key: HeadNorm | None = None
    value: HeadNorm | None = None
    rotated_query: HeadNorm | None = None
    rotated_key: HeadNorm | None = None


def prepare_attention(
    queries: Tensor,
    stored: tuple[Tensor, Tensor] | None,
    norms: HeadNorms,
    rotation: HeadRotation | None,
    pages: LayerPages,
    plan: AttentionPlan,
) -> Tensor:
    """Norm and rotate queries [tokens, heads, key_dim] -> like queries; write keys [tokens,
    kv_heads, key_dim], treated likewise, and values [.., value_dim] with their norm to the cache.

    stored: keys and values, None if another layer wrote them. On CUDA devices, one launch, and a
    second one if the cache has blocks; computed in float32 and rounded once.
    """
    if has_kernels(queries.device):
        from runtime.kernels.triton import attention_inputs

        return attention_inputs.prepare_attention(queries, stored, norms, rotation, pages, plan)
    return prepare_attention_twin(queries, stored, norms, rotation, pages, plan)


def prepare_attention_twin(
    queries: Tensor,
    stored: tuple[Tensor, Tensor] | None,
    norms: HeadNorms,
    rotation: HeadRotation | None,
    pages: LayerPages,
    plan: AttentionPlan,
) -> Tensor:
    """The specification of `prepare_attention`: one operation after the other."""
    if stored is not None:
        keys, values = stored
        keys = _normed(_rotated(_normed(keys, norms.key), rotation), norms.rotated_key)
        write_cache(keys, _normed(values, norms.value), pages, plan)
    return _normed(_rotated(_normed(queries, norms.query), rotation), norms.rotated_query)


def _rotated(x: Tensor, rotation: HeadRotation | None) -> Tensor:
    if rotation is None:
        return x
    turn = rope_halves if rotation.halves else rope_interleaved
    return turn(x, rotation.cos, rotation.sin)


def _normed(x: Tensor, norm: HeadNorm | None) -> Tensor:
    return x if norm is None else rms_norm(x, norm.weight, norm.eps)
