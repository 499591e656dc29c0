"""Where an adapter is, for code that does not read it."""

from dataclasses import dataclass
from pathlib import Path

MAX_ADAPTERS = 16  # of a model


@dataclass(frozen=True, slots=True)
class AdapterPath:
    """An adapter's file, and the factor of its changes beside the one that the file implies."""

    path: Path
    scale: float = 1.0
