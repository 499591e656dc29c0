"""Rotary embeddings by several positions of a token, such as time, row and column (M-RoPE)."""

from collections.abc import Sequence
from dataclasses import replace

from model_zoo.gguf.metadata import Metadata
from model_zoo.layers.rope import Rotary, axes_of

KEYS = ("rope.dimension_sections", "rope.mrope_section", "mrope_sections")


def in_sections(
    rotary: Rotary,
    metadata: Metadata,
    *,
    default: Sequence[int],
    interleaved: bool,
    position_axes: int = 3,
) -> Rotary:
    """The embedding with the axis of each frequency.

    default: frequencies of each axis if the file states none. Further axes must be empty;
    otherwise raises ModelFileError. Interleaved sections may be too long, as converters write
    those of the published models for other widths too.
    """
    count, key = len(rotary.frequencies), _key(metadata)
    stated = list(metadata.get_array(key, int) or default)
    sections = stated[:position_axes]
    alike = sum(sections) >= count if interleaved else sum(sections) == count
    further = stated[position_axes:]
    if len(sections) < position_axes or any(further) or min(sections) < 0 or not alike:
        raise metadata.error(
            key,
            f"is {stated[:8]}; {position_axes} numbers that make up {count} frequencies are needed",
        )
    axes = axes_of(sections, count, interleaved=interleaved)
    axes = axes.to(rotary.frequencies.device)
    return replace(rotary, axes=axes, position_axes=position_axes)


def stated_sections(metadata: Metadata) -> Sequence[int]:
    """The sections of files that only some models of a family have; empty for the other models."""
    sections = metadata.get_array(_key(metadata), int) or ()
    return sections if any(sections) else ()


def _key(metadata: Metadata) -> str:
    return next((key for key in KEYS if metadata.has(key)), KEYS[0])
