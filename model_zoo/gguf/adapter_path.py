"""The path and scale of an adapter, for code that does not read it."""

from dataclasses import dataclass
from pathlib import Path

MAX_ADAPTERS = 16  # per model


@dataclass(frozen=True, slots=True)
class AdapterPath:
    """An adapter's file, and a factor of its changes in addition to the one that the file
    implies."""

    path: Path
    scale: float = 1.0
