"""Rotating cached keys to other positions."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from runtime.kernels.cache_rows import decode_rows, encode_rows
from runtime.kernels.pointwise import rope_halves_twin, rope_interleaved_twin
from runtime.kv.page_group import KeyShift
from runtime.worker.model import KeyRotation, LayerPages

# Pages rotated at once, so that the rows in float32 take less memory than those of a step.
BLOCK_PAGES = 4


def shift_keys(pages: LayerPages, rotation: KeyRotation, shifts: Sequence[KeyShift]) -> None:
    """Rotate the keys of the pages in `shifts` by `by` positions each. The pages are distinct and
    belong to the layer's group.

    Rotations of rotary embeddings add up (Su et al., "RoFormer", section 3.2); scales of rotated
    keys, such as YaRN's, are unaffected. Does not synchronise the device.
    """
    key_dim, turn = pages.dims[0], rope_halves_twin if rotation.halves else rope_interleaved_twin
    for by, some in _blocks(shifts):
        angles = rotation.frequencies.to(pages.keys.device).double() * by
        cos, sin = (part.float()[None] for part in (angles.cos(), angles.sin()))
        stored = torch.stack([pages.keys[shift.page] for shift in some])
        keys = decode_rows(stored, pages.type, key_dim)
        keys[..., rotation.first :] = _turned(keys[..., rotation.first :], cos, sin, turn)
        encoded = encode_rows(keys, pages.type)
        for shift, page in zip(some, encoded, strict=True):
            pages.keys[shift.page, shift.first :].copy_(page[shift.first :])


def _turned(keys: Tensor, cos: Tensor, sin: Tensor, turn: Callable[..., Tensor]) -> Tensor:
    """keys [pages, cells, heads, dim], cos and sin [1, rotated / 2]."""
    return turn(keys.flatten(0, 1), cos, sin).view_as(keys)


def _blocks(shifts: Sequence[KeyShift]) -> Iterator[tuple[int, Sequence[KeyShift]]]:
    """Groups of shifts by the same number of positions, a few pages each."""
    for by in dict.fromkeys(shift.by for shift in shifts):
        same = [shift for shift in shifts if shift.by == by]
        for begin in range(0, len(same), BLOCK_PAGES):
            yield by, same[begin : begin + BLOCK_PAGES]
