"""What a process with models on demand tells of itself, as plain values."""

from dataclasses import dataclass

from serve_app.gateway.listing import LoadedModel
from serve_app.transport.wire import Address


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that is loaded, or on its way if it is not `ready`; `users` have asked for it."""

    loaded: LoadedModel
    ready: bool = False
    users: int = 0
    running: int = 0
    waiting: int = 0
    slots: int = 0


@dataclass(frozen=True, slots=True)
class PoolReport:
    """`store`: equal for processes that share one. `listing`: changes when what it holds does.

    `capacity_bytes` for models, of which `free_bytes` are not reserved; `most_models` at once.
    """

    address: Address
    store: str
    listing: str
    capacity_bytes: int
    free_bytes: int
    most_models: int | None = None
    residents: tuple[Resident, ...] = ()

    @property
    def replica(self) -> str:
        return self.address.replica

    def resident(self, model: str) -> Resident | None:
        named = (each for each in self.residents if each.loaded.model.name == model)
        return next(named, None)
