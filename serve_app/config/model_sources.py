"""The sources of models that are named in requests or commands. Names are never read as paths."""

from model_zoo.sources.reference import PathSource, RegistrySource, RemoteSource, parse_source
from model_zoo.store.manifest import SOURCE
from model_zoo.store.model_name import HUB_HOST, ModelName
from model_zoo.store.store import Store
from runtime.errors import RequestError, SourceError


def named_source(text: str, store: Store) -> RemoteSource:
    """The remote source of a model. SourceError if the text does not name one.

    A name without a scheme is in Ollama's registry, unless the store has it from the Hub.
    """
    source = parse_source(text)
    if not isinstance(source, PathSource):
        return source
    name = ModelName.parse(text)
    return _origin(name, store) if name.host == HUB_HOST else RegistrySource(name)


def requested_source(text: str, store: Store) -> RemoteSource:
    """As `named_source`, for a text in a request; RequestError if it does not name a model."""
    try:
        return named_source(text, store)
    except SourceError as error:
        raise RequestError(f"invalid model name: {error}") from None


def sound_name(text: str, problem: str = "invalid model name") -> ModelName:
    """A name in a request; RequestError if it is malformed."""
    try:
        return ModelName.parse(text)
    except SourceError as error:
        raise RequestError(f"{problem}: {error}") from None


def _origin(name: ModelName, store: Store) -> RemoteSource:
    """The source in the manifest of a model from the Hub, whose name does not identify it."""
    stated = store.manifest(name).annotations.get(SOURCE) if store.find(name) else None
    origin = None if stated is None else parse_source(stated)
    if origin is None or isinstance(origin, PathSource):
        raise SourceError(f"The source of {name} is not known; give hf://organisation/repository.")
    return origin
