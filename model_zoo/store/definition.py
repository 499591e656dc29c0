"""What a model that is made of another one, or of files, is to be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from model_zoo.chat.messages import Message
from model_zoo.sources.reference import Source


@dataclass(frozen=True, slots=True)
class Definition:
    """What a new model is: another one (`base`), or files in the store, and what differs.

    `base`: a model of the store, or one that is pulled or, from a path, brought into the store
    first. `projector`: the file that takes the place of the base's own.
    `files`: blobs' digests by file name; the parts of a split model have the names that they had.
    None leaves a text or the messages as the base has them, "" takes a text away; `parameters` go
    over the base's, `licenses` join its own. `quantize`: a recipe, for weights of 16 or 32 bits.
    """

    base: Source | None = None
    projector: Source | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    system: str | None = None
    messages: tuple[Message, ...] | None = None
    licenses: tuple[str, ...] = ()
    quantize: str | None = None
