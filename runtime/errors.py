"""The exception tree of the whole project, one sentence each."""


class CaravanError(Exception):
    """Anything this project refuses or fails at, told in one sentence meant for a person."""


class ConfigurationError(CaravanError):
    """The configuration names something that does not exist or cannot be."""


class ModelFileError(CaravanError):
    """A model file is missing, damaged, or contradicts itself."""


class UnsupportedModelError(ModelFileError):
    """The file is sound, but it needs an architecture, block type or tokenizer not served yet."""


class SourceError(CaravanError):
    """A model cannot be had from the place that its source names."""


class SourceNotFoundError(SourceError):
    """The place that a source names has no such model, or does not show it to everybody."""


class StoreError(CaravanError):
    """The store of models lacks the model, is damaged, is full or cannot be written."""


class StorageFullError(StoreError):
    """The disk of the store is full, or what one tenant may keep there is used up."""


class DoesNotFitError(CaravanError):
    """The device has less memory than the model needs at worst."""


class RequestError(CaravanError):
    """The request cannot be served as it stands; the client has to change it."""


class PromptTooLongError(RequestError):
    """The prompt leaves no room for an answer within the model's context."""


class ModelNotFoundError(CaravanError):
    """No model of that name is served."""


class OverloadedError(CaravanError):
    """Too much is queued already; the same request may be served later."""


class ModelUnavailableError(OverloadedError):
    """The model cannot be served as the cluster is now: it has no place, or could not be loaded."""


class GenerationFailedError(CaravanError):
    """The model could not continue this one request; the engine goes on."""


class EngineDeadError(CaravanError):
    """The engine loop has failed; this replica serves nothing any more."""


class ReplicaLostError(CaravanError):
    """The replica that worked on the request is gone; the answer stays unfinished."""
