"""Values that processes with models on demand send to the ingress."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from model_zoo.sources.pull import PullProgress
from serve_app.messages.listing import LoadedModel
from serve_app.transport import wire
from serve_app.transport.wire import Address


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that is loaded or being loaded. `users`: requests that use it; `waiting`: those that
    wait for a slot."""

    loaded: LoadedModel
    users: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class PoolReport:
    """State of one process.

    `store`: identity of its store, equal for processes that share one. `listing`: version of the
    store's list of models. `free_bytes`: memory for models that is not reserved. `most_models`: how
    many may be loaded at once, None without a limit.
    """

    address: Address
    store: str
    listing: str
    free_bytes: int
    most_models: int | None = None
    residents: tuple[Resident, ...] = ()

    @property
    def replica(self) -> str:
        return self.address.replica

    def resident(self, model: str) -> Resident | None:
        named = (each for each in self.residents if each.loaded.model.name == model)
        return next(named, None)


@dataclass(frozen=True, slots=True)
class OperationProgress:
    """Steps of an operation from a requested number on; `count`: the number of all steps so far.

    The last step may still change.
    """

    steps: Sequence[PullProgress]
    count: int
    done: bool


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a method of one process's `StoreManager`, or the error that it raised."""

    replica: str
    value: Any = None
    failed: wire.Failed | None = None

    def result(self) -> Any:
        """The value. Raises the error that the method raised."""
        if self.failed is not None:
            raise wire.error_of(self.failed)
        return self.value
