"""Models that are asked for by name: which of their sources is meant. Paths are never looked at."""

from model_zoo.sources.reference import PathSource, RegistrySource, RemoteSource, parse_source
from model_zoo.store.manifest import SOURCE
from model_zoo.store.model_name import HUB_HOST, ModelName
from model_zoo.store.store import Store
from runtime.errors import RequestError, SourceError


def named_source(text: str, store: Store) -> RemoteSource:
    """SourceError when the text cannot mean a model elsewhere.

    A name without a scheme is one of Ollama's registry, unless the store has it from the Hub.
    """
    source = parse_source(text)
    if not isinstance(source, PathSource):
        return source
    name = ModelName.parse(text)
    return _origin(name, store) if name.host == HUB_HOST else RegistrySource(name)


def requested_source(text: str, store: Store) -> RemoteSource:
    """The same for a client's text; RequestError where it means no model."""
    try:
        return named_source(text, store)
    except SourceError as error:
        raise RequestError(f"invalid model name: {error}") from None


def sound_name(text: str, told: str = "invalid model name") -> ModelName:
    """RequestError unless a client's text is a name."""
    try:
        return ModelName.parse(text)
    except SourceError as error:
        raise RequestError(f"{told}: {error}") from None


def _origin(name: ModelName, store: Store) -> RemoteSource:
    """Names of the Hub's models do not tell all of a source; their manifests do."""
    stated = store.manifest(name).annotations.get(SOURCE) if store.find(name) else None
    origin = None if stated is None else parse_source(stated)
    if origin is None or isinstance(origin, PathSource):
        raise SourceError(
            f"Where {name} comes from is not known; give hf://organisation/repository."
        )
    return origin
