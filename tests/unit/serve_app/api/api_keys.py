"""Entries of API keys whose text a test chooses; the text of a real key is random."""

from typing import Any

from serve_app.api.keys import ApiKey, key_hash


def api_key(key: str, **entry: Any) -> ApiKey:
    """The entry of the key `key`, by default with the same name."""
    return ApiKey.model_validate({"name": key, "sha256": key_hash(key), **entry})
