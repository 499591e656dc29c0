"""What a new model is to be, from a Modelfile or from the fields of a request."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from model_zoo.chat.messages import Message
from model_zoo.chat.template_language import check_jinja
from model_zoo.sources.reference import PathSource, RegistrySource, RemoteSource, parse_source
from model_zoo.store.definition import Definition
from model_zoo.store.manifest import check_digest
from model_zoo.store.model_name import ModelName
from model_zoo.store.modelfile import ROLES, Command, parse_modelfile
from runtime.errors import RequestError, SourceError
from serve_app.config.parameters import check_parameters, parameter_of
from serve_app.config.settings import ModelSettings

_BLOB = re.compile(r"@(sha256)[:-]([0-9a-f]{64})")
_PATH = re.compile(r"[./~\\].*|.*\\.*|.*\.(gguf|safetensors|bin)", re.IGNORECASE | re.DOTALL)


# What the text of a FROM line means: another model or files, with what these bring.
Materials = Callable[[str], Definition]


def of_modelfile(text: str, materials: Materials) -> Definition:
    """`materials`: what a FROM line means where the Modelfile is read.

    RequestError names the line that is wrong.
    """
    commands = parse_modelfile(text)
    froms = [command for command in commands if command.name == "from"]
    found = [_told(command, lambda each: materials(each.value)) for command in froms]
    definition = Definition(
        parameters=_parameters(c for c in commands if c.name == "parameter"),
        template=_last(commands, "template"),
        system=_last(commands, "system"),
        messages=_messages(commands),
        licenses=tuple(c.value for c in commands if c.name == "license" and c.value),
    )
    if definition.template:
        line = [command for command in commands if command.name == "template"][-1]
        _told(line, lambda each: check_jinja(each.value))
    return _made_of(definition, found)


def of_fields(
    *,
    base: str | None,
    files: Mapping[str, str],
    parameters: Mapping[str, Any],
    template: str | None,
    system: str | None,
    messages: Sequence[Message],
    licenses: Sequence[str],
    quantize: str | None,
    materials: Materials,
) -> Definition:
    """As a request states them; what is empty was not said."""
    if not base and not files:
        raise RequestError("neither 'from' or 'files' was specified")
    if base and files:
        raise RequestError("'from' and 'files' exclude each other")
    check_parameters(parameters)
    if template:
        check_jinja(template)
    definition = Definition(
        files=files,
        parameters={name: value for name, value in parameters.items() if value is not None},
        template=template or None,
        system=system or None,
        messages=tuple(messages) or None,
        licenses=tuple(text for text in licenses if text),
        quantize=quantize or None,
    )
    return _made_of(definition, [materials(base)]) if base else definition


def remote_material(text: str) -> Definition:
    """Of a FROM line that came through the network: never a path of this machine."""
    blob = _BLOB.fullmatch(text)
    if blob is not None:
        return Definition(files={f"{blob[2][:12]}.gguf": f"{blob[1]}:{blob[2]}"})
    if _PATH.fullmatch(text) and "://" not in text:
        raise RequestError(
            f"{text[:80]!r} is a path, and files of the server are not to be had from here; upload "
            "the file (POST /api/blobs/sha256:…) and name its digest, or name a model"
        )
    return Definition(base=named_base(text))


def configured_material(settings: ModelSettings) -> Definition:
    """What a configured model is: its sources, and what the configuration says beside them.

    Its `context_tokens` become the parameter `num_ctx`, unless `defaults` say another.
    """
    context = {} if settings.context_tokens is None else {"num_ctx": settings.context_tokens}
    return Definition(
        base=parse_source(settings.source),
        projector=None if settings.projector is None else parse_source(settings.projector),
        system=settings.system,
        parameters={**context, **settings.defaults},
    )


def blob_digest(text: str) -> str:
    """From `sha256:` or `sha256-` with 64 hexadecimal digits. RequestError for anything else."""
    try:
        return check_digest(text.replace("sha256-", "sha256:", 1))
    except SourceError:
        raise RequestError("invalid digest format") from None


def named_base(text: str) -> RemoteSource:
    """RequestError unless it names a model, of the store or of a place where models are had."""
    try:
        source = parse_source(text)
        return RegistrySource(ModelName.parse(text)) if isinstance(source, PathSource) else source
    except SourceError as error:
        raise RequestError(f"invalid model name: {error}") from None


def _made_of(definition: Definition, materials: Sequence[Definition]) -> Definition:
    """The definition on top of what it is made of."""
    bases = [each for each in materials if each.base is not None]
    files = {name: digest for each in materials for name, digest in each.files.items()}
    if len(bases) > 1 or (bases and files):
        raise RequestError("a model is made of one other model, or of files; FROM names more")
    base = bases[0] if bases else Definition(files=files)
    return replace(
        definition,
        base=base.base,
        projector=base.projector,
        files=base.files,
        system=base.system if definition.system is None else definition.system,
        parameters={**base.parameters, **definition.parameters},
    )


def _parameters(commands: Iterable[Command]) -> dict[str, Any]:
    """By name; `stop` may be said several times."""
    stated: dict[str, Any] = {}
    for command in commands:
        name = command.key or ""
        if name == "stop":
            stated["stop"] = [*stated.get("stop", []), command.value]
        else:
            stated[name] = parameter_of(name, command.value)
        _told(command, lambda each: check_parameters({each.key or "": stated[each.key or ""]}))
    return stated


def _messages(commands: Iterable[Command]) -> tuple[Message, ...] | None:
    said = [Message(c.key or ROLES[0], c.value) for c in commands if c.name == "message"]
    return tuple(said) or None


def _last(commands: Sequence[Command], name: str) -> str | None:
    return next((c.value for c in reversed(commands) if c.name == name), None)


def _told(command: Command, check: Callable[[Command], Any]) -> Any:
    """With the line, where it fails."""
    try:
        return check(command)
    except RequestError as error:
        raise command.refuse(str(error)) from None
