"""Which models there are: those of the configuration, and those in the stores of the cluster."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.errors import ModelNotFoundError
from serve_app.api.keys import AllowedModels
from serve_app.config.options import Options
from serve_app.config.settings import canonical_name
from serve_app.gateway.listing import ListedModel, LoadedModel, together


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and the options that its requests start from.

    `brings_options`: it may have some of its own, which only a replica knows.
    """

    name: str
    options: Options
    brings_options: bool = False


class Lists(Protocol):
    """What is told of models without waiting for any that is not there."""

    async def configured(self) -> Sequence[ListedModel]: ...
    async def stored(self) -> Sequence[ListedModel]: ...
    async def find_stored(self, name: str) -> ListedModel | None: ...
    async def loaded(self) -> Sequence[LoadedModel]: ...


class Catalogue:
    """`models`: the configured ones; a name in a store that is theirs too means theirs.

    `defaults`: what requests to any of the others start from.
    """

    def __init__(
        self, models: Iterable[ServedModel], lists: Lists, *, defaults: Options | None = None
    ) -> None:
        self._models = {canonical_name(model.name): model for model in models}
        self._lists = lists
        self._defaults = defaults or Options()

    async def find(self, name: str, allowed: AllowedModels) -> ServedModel:
        """ModelNotFoundError when there is none of that name; the same for one that is not allowed,
        so that a client cannot find out that it exists."""
        served = self._models.get(canonical_name(name)) or await self._found(name)
        if served is None or served.name not in allowed:
            raise ModelNotFoundError(f"model '{name}' not found")
        return served

    async def listed(self, allowed: AllowedModels) -> list[ListedModel]:
        """The allowed models that can be served, the newest first."""
        stored = [
            model
            for model in await self._lists.stored()
            if canonical_name(model.name) not in self._models
        ]
        models = [*await self._lists.configured(), *stored]
        models = [model for model in models if model.name in allowed]
        return sorted(models, key=lambda model: model.modified_at, reverse=True)

    async def loaded(self, allowed: AllowedModels) -> list[LoadedModel]:
        """The allowed models in memory anywhere, those that stay longest first."""
        loaded = await self._lists.loaded()
        return together(each for each in loaded if each.model.name in allowed)

    async def _found(self, name: str) -> ServedModel | None:
        stored = await self._lists.find_stored(name)
        if stored is None:
            return None
        return ServedModel(stored.name, self._defaults.over(stored.options))
