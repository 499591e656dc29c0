"""The exception classes of the project."""


class CaravanError(Exception):
    """Base class; the message is one sentence for users."""


class ConfigurationError(CaravanError):
    """The configuration is invalid."""


class ModelFileError(CaravanError):
    """A model file is missing, damaged, or contradicts itself."""


class UnsupportedModelError(ModelFileError):
    """The file is valid, but its architecture, block type or tokenizer is not supported."""


class SourceError(CaravanError):
    """A model cannot be downloaded from its source."""


class SourceNotFoundError(SourceError):
    """The source has no such model, or access to it is restricted."""


class StoreError(CaravanError):
    """The model store lacks the model, is damaged, is full or cannot be written."""


class StorageFullError(StoreError):
    """The disk of the store is full, or a tenant's quota is used up."""


class DoesNotFitError(CaravanError):
    """The device has less memory than the model may need."""


class RequestError(CaravanError):
    """The request is invalid; the client must change it."""


class PromptTooLongError(RequestError):
    """The prompt is too long for the model's context, or the conversation for another limit; the
    client must shorten it."""


class TooManyImagesError(PromptTooLongError):
    """The images are too many or too large together; a shorter conversation may be accepted."""


class InvalidImageError(RequestError):
    """An image is none, damaged or too large, cannot be fetched, or the model has no vision.
    `field`: where the request has it; None if unknown."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message)
        self.field = field


class TemplateLimitError(RequestError):
    """The chat template needs more time, memory or text than it may have."""


class ModelNotFoundError(CaravanError):
    """No model of this name is served."""


class OverloadedError(CaravanError):
    """The queue is full; the client may retry later."""


class ModelUnavailableError(OverloadedError):
    """The model cannot be scheduled on the cluster now, or could not be loaded."""


class GenerationFailedError(CaravanError):
    """The model could not continue this request; the engine is not affected."""


class EngineDeadError(CaravanError):
    """The engine loop has ended; the replica cannot serve requests."""


class ReplicaLostError(CaravanError):
    """The replica of the request was lost; the answer is incomplete."""
