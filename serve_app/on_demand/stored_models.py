"""List entries of the models of one store."""

import hashlib
from contextlib import suppress

from model_zoo.sources.resolve import resolve_stored
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from runtime.errors import CaravanError, StoreError
from serve_app.config.options import served_options
from serve_app.messages.listing import ListedModel
from serve_app.replica.file_headers import listed_file


class StoredModels:
    """Lists the models. Each version of a model is read only once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[tuple[str, str, int], ListedModel] = {}

    def version(self) -> str:
        """Changes whenever a manifest is added, removed or changed, or the store cannot be read."""
        digest = hashlib.sha256()
        try:
            names = self._store.names()
        except StoreError as error:  # raised to those who request the list
            return str(error)
        for name in names:
            with suppress(OSError):
                status = self._store.manifest_path(name).stat()
                digest.update(f"{name} {status.st_mtime_ns} {status.st_size}\n".encode())
        return digest.hexdigest()

    def listed(self) -> tuple[ListedModel, ...]:
        """All models except damaged ones. StoreError if the store cannot be read."""
        found = {}
        for name in self._store.names():
            with suppress(CaravanError, OSError):
                changed = self._store.manifest_path(name).stat().st_mtime_ns
                key = (str(name), self._store.manifest(name).digest, changed)
                found[key] = self._known.get(key) or self._read(name)
        self._known = found
        return tuple(found.values())

    def _read(self, name: ModelName) -> ListedModel:
        stored = self._store.open(name)
        # The served context is decided when the model is loaded.
        resolved = resolve_stored(stored, self._store)
        own = {name: value for name, value in resolved.parameters.items() if name != "num_ctx"}
        options, _ = served_options(own)
        return listed_file(
            str(stored.name),
            stored.files[0],
            has_projector=bool(stored.projectors),
            options=options,
            stored=stored,
            template=resolved.served_template,
        )
