"""API keys: each has a name, a hash and limits, and is read from a file or the environment.

Only hashes are stored and passed on, because Ray writes the arguments of applications to its logs,
its dashboard and its state.
"""

import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from runtime.errors import ConfigurationError
from serve_app.api.limits import Limits
from serve_app.config.sections import Count, Section
from serve_app.config.settings import source_path
from serve_app.config.wrong_values import requirement, spelled
from serve_app.gateway.allowed_models import AllowedModels

ENVIRONMENT = "CARAVAN_API_KEYS"
# The prefix by which secret scanners, and people, recognise a key.
PREFIX = "sk-caravan-"
KEY_BYTES = 32
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._@\-]{0,63}$"
NAME_RULE = "at most 64 letters, digits and ._@-, beginning with a letter or a digit"
_MODEL = spelled(
    r"[A-Za-z0-9_*.\-/:]{1,256}", "a name of a model, in which * stands for any characters"
)
# No access for others, no write access for the group. The group may read, because Kubernetes mounts
# secrets as files owned by root that the pod's group can read.
_FORBIDDEN_MODE = 0o027
_HASH = re.compile(r"[0-9a-f]{64}")
_FIELD = re.compile(r"[a-z0-9_]{1,32}")


class ApiKey(Section):
    """The permissions of one key. Its limits apply over all ingress processes."""

    name: Annotated[str, spelled(NAME_PATTERN, NAME_RULE)]
    """The client's name in limits, queues and logs."""
    sha256: str
    """SHA-256 of the key."""
    manage: bool = False
    """Whether the key may pull, push, create, copy and delete models and upload files for these;
    other keys get 403."""
    trace: bool = False
    """Whether requests of the key may have the header `x-caravan-trace: 1`; others get 403; see
    "Traces"."""
    priority: bool = False
    """Whether completions of the key may have vLLM's field `priority`, -1000 to 1000, other than 0;
    others get 403. Of the requests that wait in a replica, those with lower numbers are admitted
    first, before turns over tenants apply."""
    models: tuple[Annotated[str, _MODEL], ...] | None = Field(default=None, min_length=1)
    """Names of the models that the key may use, `*` for any text (`qwen3:*`); other models are 404
    for it and not listed; null: all. Not with `manage`."""
    requests_per_minute: int | None = Count
    """Limit of POST and DELETE requests."""
    tokens_per_minute: int | None = Count
    """Limit of tokens of prompts and answers."""
    concurrent_requests: int | None = Count
    """Limit of concurrent requests; null: as in `args`."""

    @field_validator("sha256")
    @classmethod
    def _hash(cls, value: str) -> str:
        if not _HASH.fullmatch(value):
            raise ValueError(
                "it must be the SHA-256 of the key, 64 digits 0-9 and a-f; `caravan key new` "
                "prints it. Do not put the key itself here"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.manage and self.models is not None:
            raise ValueError("manage and models exclude each other: managers may use all models")
        return self

    @property
    def allowed_models(self) -> AllowedModels:
        return AllowedModels(self.models)

    def limits(self, concurrent_requests: int | None) -> Limits:
        """The key's limits; `concurrent_requests` applies where the key states none."""
        concurrent = self.concurrent_requests or concurrent_requests
        return Limits(self.requests_per_minute, self.tokens_per_minute, concurrent)


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def key_hash(key: str) -> str:
    """The SHA-256 of a key. A slow hash, as for passwords, is not needed: a key has 256 random bits
    and cannot be guessed.
    """
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: str | None, environment: Mapping[str, str]) -> tuple[ApiKey, ...] | None:
    """The keys of `api_keys_file` or of the environment; None if neither is set.

    A ConfigurationError never quotes what was read, since it may contain a key.
    """
    text = environment.get(ENVIRONMENT)
    if path is None:
        return None if text is None else _parsed(text, ENVIRONMENT)
    if text is not None:
        raise ConfigurationError(
            f"`api_keys_file` and the variable {ENVIRONMENT} are both set; use one of them."
        )
    return _parsed(_content(source_path(path)), f"`api_keys_file` {path}")


def _content(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & _FORBIDDEN_MODE:
                raise ConfigurationError(
                    f"`api_keys_file` {path} can be read or changed by other users; run "
                    f"`chmod 600 {path}`."
                )
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(f"`api_keys_file` {path} cannot be read: {reason}.") from None


def _parsed(text: str, source: str) -> tuple[ApiKey, ...]:
    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" in line {mark.line + 1}"
        raise ConfigurationError(f"{source} is neither YAML nor JSON{place}.") from None
    if not isinstance(entries, list) or not entries:
        raise ConfigurationError(
            f"{source} is not a list of keys; `caravan key new NAME` prints an entry of it."
        )
    try:
        keys = TypeAdapter(tuple[ApiKey, ...]).validate_python(entries)
    except ValidationError as error:
        lines = [_line(dict(details)) for details in error.errors(include_input=False)]
        raise ConfigurationError(f"{source}: {'; '.join(lines)}.") from None
    for field in ("name", "sha256"):
        if len({getattr(key, field) for key in keys}) < len(keys):
            raise ConfigurationError(f"{source}: two entries have the same {field}.")
    return keys


def _line(details: dict[str, Any]) -> str:
    entry, *rest = details["loc"]
    names = [str(part) for part in rest if not isinstance(part, int)]
    field = names[0] if names and _FIELD.fullmatch(names[0]) else "a field"
    place = f"entry {entry + 1}" + (f", {field}" if names else "")
    if details["type"] == "extra_forbidden":
        return f"{place} is not known; known are {', '.join(ApiKey.model_fields)}"
    if details["type"] == "missing":
        return f"{place} is missing"
    if (required := requirement(details)) is not None:
        return f"{place} must be {required}"
    message = details["msg"].removeprefix("Value error, ")
    return f"{place}: {message[:1].lower()}{message[1:]}"
