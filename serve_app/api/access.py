"""The API key of a request, the models that it may use, and whether it is traced."""

from starlette.requests import Request
from starlette.types import Scope

from serve_app.api.keys import ApiKey
from serve_app.gateway.allowed_models import ALL_MODELS, AllowedModels
from serve_app.telemetry.request_context import current_request

_STATE = "api_key"
_TRACED = "traced"


def set_key(scope: Scope, key: ApiKey) -> None:
    scope.setdefault("state", {})[_STATE] = key
    context = current_request.get()
    if context is not None:
        context.key = key.name


def key_of(scope: Scope) -> ApiKey | None:
    """The request's API key; None on servers without keys."""
    return scope.get("state", {}).get(_STATE)


def allowed_models(request: Request) -> AllowedModels:
    key = key_of(request.scope)
    return ALL_MODELS if key is None else key.allowed_models


def set_traced(scope: Scope) -> None:
    scope.setdefault("state", {})[_TRACED] = True


def is_traced(request: Request) -> bool:
    """Whether the request is traced: the client has asked for it and is permitted to."""
    return request.scope.get("state", {}).get(_TRACED, False)
