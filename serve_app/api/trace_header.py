"""The header with which a client requests a trace of its request."""

from starlette.datastructures import Headers
from starlette.types import Scope

from serve_app.api.access import key_of, set_traced
from serve_app.api.refusals import Refusal

HEADER = "x-caravan-trace"


class PermitTraces:
    """Check behind RequireKey: 403 for the header `x-caravan-trace: 1` unless the key has `trace`
    or, on servers without keys, `without_keys` is set; 400 for values other than 0 and 1.
    """

    def __init__(self, *, without_keys: bool) -> None:
        self._without_keys = without_keys

    def __call__(self, scope: Scope) -> Refusal | None:
        value, key = Headers(scope=scope).get(HEADER, "0"), key_of(scope)
        if value == "0":
            return None
        if value != "1":
            return Refusal(400, f"header `{HEADER}` must be 0 or 1")
        if self._without_keys if key is None else key.trace:
            set_traced(scope)
            return None
        if key is None:
            reason = "without API keys, requests are traced only with `trace_without_keys: true`"
        else:
            reason = f"API key '{key.name}' may not trace requests; its entry lacks `trace: true`"
        return Refusal(403, reason)
