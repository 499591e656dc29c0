"""What an ingress asks of processes with models on demand, and what they answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from model_zoo.sources.pull import PullProgress
from model_zoo.store.definition import Definition
from serve_app.transport import wire


@dataclass(frozen=True, slots=True)
class Listing:
    """The models in the store: tuple[ListedModel, ...]."""


@dataclass(frozen=True, slots=True)
class Describe:
    """A model's card: ModelCard."""

    model: str
    verbose: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    model: str
    keep_alive_s: float | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Unload:
    """Whether it was loaded: bool."""

    model: str


@dataclass(frozen=True, slots=True)
class Pull:
    """Begins to pull a model of that name, or joins who does so already: the job's id, str."""

    text: str


@dataclass(frozen=True, slots=True)
class Create:
    """Begins to make a model: the job's id, str.

    `configured`: the base is one of the configuration, which may be a file of the machine and may
    come from any host.
    """

    name: str
    definition: Definition
    configured: bool = False


@dataclass(frozen=True, slots=True)
class Follow:
    """How a job goes on: Account. A job that nobody follows any more ends."""

    operation: str
    after: int = 0


@dataclass(frozen=True, slots=True)
class Account:
    """The job's steps from number `first` on, of which the last may yet change."""

    steps: Sequence[PullProgress]
    first: int
    done: bool


@dataclass(frozen=True, slots=True)
class Copy:
    source: str
    destination: str


@dataclass(frozen=True, slots=True)
class Remove:
    model: str


@dataclass(frozen=True, slots=True)
class Holds:
    """Whether the store has the blob: bool."""

    digest: str


@dataclass(frozen=True, slots=True)
class Upload:
    """Begins to bring a blob under the id `upload`; `size` None where that is not known."""

    upload: str
    digest: str
    size: int | None
    tenant: str


@dataclass(frozen=True, slots=True)
class Append:
    upload: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Finish:
    """The bytes have all come; they are the blob if their digest is right."""

    upload: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends an upload that will not be finished."""

    upload: str


Command = (
    Listing
    | Describe
    | Load
    | Unload
    | Pull
    | Create
    | Follow
    | Copy
    | Remove
    | Holds
    | Upload
    | Append
    | Finish
    | Abort
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one process: a value, or why there is none."""

    replica: str
    value: Any = None
    failed: wire.Failed | None = None

    def result(self) -> Any:
        """Raises what the command has raised there."""
        if self.failed is not None:
            raise wire.error_of(self.failed)
        return self.value
