"""One example of an operation: a request that succeeds, and its reply."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Example:
    """`request`: the JSON body; None if the operation has none.

    `reply`: the JSON body; of a stream, its events; None if it has no body. `note`: what a reader
    must know to use the request or to understand the reply.
    """

    request: Mapping[str, Any] | None = None
    reply: Mapping[str, Any] | Sequence[Any] | None = None
    note: str = ""

    @property
    def streamed(self) -> bool:
        return isinstance(self.reply, Sequence)


# By method and path, such as "POST /api/chat".
Examples = Mapping[str, tuple[Example, ...]]
