"""Status of a replica's engines, for monitoring."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from runtime.engine.engine_statistics import EngineStatistics

Statistics = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """`engines`: the fields of EngineStatistics, by model."""

    replica: str
    engines: Mapping[str, Statistics]

    @classmethod
    def of(cls, replica: str, engines: Mapping[str, EngineStatistics]) -> "ReplicaStatus":
        """With the statistics as plain numbers."""
        return cls(replica, {model: asdict(each) for model, each in engines.items()})
