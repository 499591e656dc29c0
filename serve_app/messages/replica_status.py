"""Status of a replica's engines, for monitoring."""

from collections.abc import Mapping
from dataclasses import dataclass

Statistics = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """`engines`: the fields of EngineStatistics, by model."""

    replica: str
    engines: Mapping[str, Statistics]
