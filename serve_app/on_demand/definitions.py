"""Definitions of new models, from a Modelfile or from the fields of a request."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from model_zoo.chat.messages import Message
from model_zoo.chat.template_language import check_template
from model_zoo.sources.reference import PathSource, RegistrySource, RemoteSource, parse_source
from model_zoo.store.definition import ChosenAdapter, Definition
from model_zoo.store.manifest import check_digest
from model_zoo.store.model_name import ModelName
from model_zoo.store.modelfile import ROLES, Command, parse_modelfile
from runtime.errors import RequestError, SourceError
from serve_app.config.model_parameters import check_parameters, parameter_of
from serve_app.config.settings import ModelSettings

_BLOB = re.compile(r"@(sha256)[:-]([0-9a-f]{64})")
_PATH = re.compile(r"[./~\\].*|.*\\.*|.*\.(gguf|safetensors|bin)", re.IGNORECASE | re.DOTALL)


# Maps the text of a FROM line to the model or files that it names, with their own settings.
BaseResolver = Callable[[str], Definition]
# Maps the text of an ADAPTER line to the digest of a blob.
AdapterResolver = Callable[[str], str]


def adapter_from_request(text: str) -> str:
    """The blob of an ADAPTER line that came over the network. RequestError if it names none."""
    blob = _BLOB.fullmatch(text)
    if blob is None:
        raise RequestError(
            f"{text[:80]!r} is not an adapter; upload the file (POST /api/blobs/sha256:…) and name "
            "its digest, as in @sha256:…"
        )
    return f"{blob[1]}:{blob[2]}"


def definition_from_modelfile(
    text: str,
    resolve_base: BaseResolver,
    resolve_adapter: AdapterResolver = adapter_from_request,
) -> Definition:
    """The definition in a Modelfile. Raises RequestErrors that name the line.

    Files, which may be large, are resolved when everything else is right.
    """
    commands = parse_modelfile(text)
    definition = Definition(
        parameters=_parameters(c for c in commands if c.name == "parameter"),
        template=_last(commands, "template"),
        system=_last(commands, "system"),
        messages=_messages(commands),
        licenses=tuple(c.value for c in commands if c.name == "license" and c.value),
    )
    if definition.template:
        line = [command for command in commands if command.name == "template"][-1]
        _with_line(line, lambda each: check_template(each.value))
    adapters = _each(commands, "adapter", lambda text: ChosenAdapter(resolve_adapter(text)))
    bases = _each(commands, "from", resolve_base)
    return _based_on(replace(definition, adapters=tuple(adapters) or None), bases)


def definition_from_fields(
    stated: Definition, base: str | None, resolve_base: BaseResolver
) -> Definition:
    """The definition in the fields of a request; empty values count as absent. RequestError for
    invalid ones.

    `stated`: the fields that need no lookup; `base`: the name of the model or blob to start from.
    """
    if not base and not stated.files:
        raise RequestError("neither 'from' or 'files' was specified")
    if base and stated.files:
        raise RequestError("'from' and 'files' exclude each other")
    check_parameters(stated.parameters)
    if stated.template:
        check_template(stated.template)
    definition = replace(
        stated,
        parameters={name: each for name, each in stated.parameters.items() if each is not None},
        template=stated.template or None,
        system=stated.system or None,
        messages=stated.messages or None,
        licenses=tuple(text for text in stated.licenses if text),
        quantize=stated.quantize or None,
        adapters=stated.adapters or None,
    )
    return _based_on(definition, [resolve_base(base)]) if base else definition


def base_from_request(text: str) -> Definition:
    """The base of a FROM line that came over the network, which is never a path of this machine."""
    blob = _BLOB.fullmatch(text)
    if blob is not None:
        return Definition(files={f"{blob[2][:12]}.gguf": f"{blob[1]}:{blob[2]}"})
    if _PATH.fullmatch(text) and "://" not in text:
        raise RequestError(
            f"{text[:80]!r} is a path, and requests cannot read files of the server; upload the "
            "file (POST /api/blobs/sha256:…) and name its digest, or name a model"
        )
    return Definition(base=named_base(text))


def base_from_settings(settings: ModelSettings) -> Definition:
    """A configured model as a base: its sources, system prompt and defaults.

    Its `context_tokens` become the parameter `num_ctx`, unless `defaults` contain one.
    """
    context = {} if settings.context_tokens is None else {"num_ctx": settings.context_tokens}
    return Definition(
        base=parse_source(settings.source),
        projector=None if settings.projector is None else parse_source(settings.projector),
        system=settings.system,
        parameters={**context, **settings.defaults},
        adapters=tuple(
            ChosenAdapter(parse_source(each.source), each.scale) for each in settings.adapters
        )
        if settings.adapters is not None
        else None,
    )


def blob_digest(text: str) -> str:
    """The digest in `sha256:` or `sha256-` with 64 hexadecimal digits. RequestError for anything
    else."""
    try:
        return check_digest(text.replace("sha256-", "sha256:", 1))
    except SourceError:
        raise RequestError("invalid digest format") from None


def named_base(text: str) -> RemoteSource:
    """A model of the store, the Hub or a registry. RequestError if the text names none."""
    try:
        source = parse_source(text)
        return RegistrySource(ModelName.parse(text)) if isinstance(source, PathSource) else source
    except SourceError as error:
        raise RequestError(f"invalid model name: {error}") from None


def _based_on(definition: Definition, bases: Sequence[Definition]) -> Definition:
    """The definition, completed with the settings of its base."""
    models = [each for each in bases if each.base is not None]
    files: dict[str, str] = {}
    for name, digest in (item for each in bases for item in each.files.items()):
        if files.setdefault(name, digest) != digest:
            raise RequestError(f"FROM names two files with the name {name[:80]}; rename one")
    if len(models) > 1 or (models and files):
        raise RequestError("FROM must name one model, or files; it names more")
    base = models[0] if models else Definition(files=files)
    return replace(
        definition,
        base=base.base,
        projector=base.projector,
        files=base.files,
        system=base.system if definition.system is None else definition.system,
        parameters={**base.parameters, **definition.parameters},
        adapters=base.adapters if definition.adapters is None else definition.adapters,
    )


def _parameters(commands: Iterable[Command]) -> dict[str, Any]:
    """Values by name; `stop` may occur several times."""
    stated: dict[str, Any] = {}
    for command in commands:
        name = command.key or ""
        if name == "stop":
            stated["stop"] = [*stated.get("stop", []), command.value]
        else:
            stated[name] = parameter_of(name, command.value)
        _with_line(command, lambda each: check_parameters({each.key or "": stated[each.key or ""]}))
    return stated


def _messages(commands: Iterable[Command]) -> tuple[Message, ...] | None:
    messages = [Message(c.key or ROLES[0], c.value) for c in commands if c.name == "message"]
    return tuple(messages) or None


def _last(commands: Sequence[Command], name: str) -> str | None:
    return next((c.value for c in reversed(commands) if c.name == name), None)


def _each(commands: Sequence[Command], name: str, resolve: Callable[[str], Any]) -> list[Any]:
    """What `resolve` makes of the value of each command of this name."""
    return [_with_line(c, lambda each: resolve(each.value)) for c in commands if c.name == name]


def _with_line(command: Command, check: Callable[[Command], Any]) -> Any:
    """The result of `check`; its RequestError names the command's line."""
    try:
        return check(command)
    except RequestError as error:
        raise command.refuse(str(error)) from None
