"""The API key of a request, and the models that it may use."""

from starlette.requests import Request
from starlette.types import Scope

from serve_app.api.keys import ALL_MODELS, AllowedModels, ApiKey

_STATE = "api_key"


def set_key(scope: Scope, key: ApiKey) -> None:
    scope.setdefault("state", {})[_STATE] = key


def key_of(scope: Scope) -> ApiKey | None:
    """The request's API key; None on servers without keys."""
    return scope.get("state", {}).get(_STATE)


def allowed_models(request: Request) -> AllowedModels:
    key = key_of(request.scope)
    return ALL_MODELS if key is None else key.allowed_models
