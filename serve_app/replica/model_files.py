"""The files of a configured model, and the settings that a pulled model brings."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from model_zoo.gguf.adapter_path import AdapterPath
from model_zoo.sources.pull import Progress, PullProgress, StepWriter
from model_zoo.sources.reference import PathSource, parse_source
from model_zoo.sources.resolve import ResolvedModel, resolve, resolve_stored, stored_model
from model_zoo.store.store import Store, StoredModel, default_root
from runtime.errors import ModelFileError
from serve_app.config.model_parameters import known_parameters
from serve_app.config.options import Options, served_options
from serve_app.config.settings import ModelSettings, source_path
from serve_app.logs import get_logger
from serve_app.replica.prompt_defaults import PromptDefaults

PROGRESS_LOG_S = 2.0

log = get_logger()


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's files on this machine, and the model's own settings. The configuration overrides
    these.

    `projector_required`: it was configured, so loading fails without it. `options`,
    `context_tokens` and `template` are the model's own; `parameters` are all options that it
    states, including unsupported ones. `stored`: its entry in the store, None for a path. `draft`:
    the draft model. `unused`: parts of the model that are not used, with the reasons, for the log.
    """

    path: Path
    projector: Path | None = None
    projector_required: bool = False
    options: Options = field(default_factory=Options)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    context_tokens: int | None = None
    prompt_defaults: PromptDefaults = field(default_factory=PromptDefaults)
    template: str | None = None
    license: str | None = None
    stored: StoredModel | None = None
    unused: tuple[str, ...] = ()
    adapters: tuple[AdapterPath, ...] = ()
    draft: Path | None = None

    @property
    def paths(self) -> list[Path]:
        """All files."""
        adapters = [each.path for each in self.adapters]
        return [path for path in (self.path, self.projector, self.draft, *adapters) if path]

    @property
    def blobs(self) -> tuple[str, ...]:
        """The digests of the model's parts and its own adapters in the store; none for a path."""
        layers = () if self.stored is None else self.stored.manifest.layers
        return tuple(each.digest for each in layers if each.kind in ("model", "adapter"))

    def without(self, what: str, reason: Exception) -> "ModelFiles":
        """A copy without the "projector" or the "template", with the reason in `unused`."""
        unused = (*self.unused, f"{what}: {reason}")
        return replace(self, **{what: None}, unused=unused)  # type: ignore[arg-type]


def local_files(settings: ModelSettings, environment: Mapping[str, str]) -> ModelFiles | None:
    """The model's files; None if one of them has to be pulled first.

    ModelFileError: this node has no file at a configured path.
    """
    store = Store(default_root(environment))
    found = {source: _local(source, store) for source in _sources(settings)}
    present = {source: each for source, each in found.items() if each is not None}
    return None if len(present) < len(found) else _model_files(settings, present)


def pulled_files(settings: ModelSettings, environment: Mapping[str, str]) -> ModelFiles:
    """The model's files; those that are not in the store are pulled, with progress in the log.

    SourceError: a pull failed. StoreError: the store cannot be written. ModelFileError: this node
    has no file at a configured path.
    """
    store = Store(default_root(environment))

    def resolved(source: str) -> ResolvedModel:
        progress = _logging(settings.name, source)
        local = _local(source, store)
        return local or resolve(source, store, progress=progress, environment=environment)

    return _model_files(settings, {source: resolved(source) for source in _sources(settings)})


def pull_notice(settings: ModelSettings, environment: Mapping[str, str]) -> str:
    """The message for a model that `local_files` does not find."""
    sources = " with ".join(_sources(settings))
    return (
        f"Model {settings.name}: {sources} is not in the store {default_root(environment)} of this "
        "machine. Each node that serves it pulls and checks it when a replica starts."
    )


def _local(text: str, store: Store) -> ResolvedModel | None:
    source = parse_source(text)
    if isinstance(source, PathSource):
        return ResolvedModel(_existing(source_path(text)))
    stored = stored_model(source, store)
    return None if stored is None else resolve_stored(stored, store)


def _existing(path: Path) -> Path:
    """ModelFileError that names this node if the file is missing here; it may exist on others."""
    try:
        path.stat()
    except FileNotFoundError:
        node = os.uname().nodename
        raise ModelFileError(f"{path}: there is no such file on {node}.") from None
    except (OSError, ValueError):
        pass  # reported where the file is opened
    return path


def _sources(settings: ModelSettings) -> list[str]:
    """The sources of the model and of its other files."""
    single = (settings.projector, settings.speculation.draft)
    others = [source for source in single if source is not None]
    return [settings.source, *others, *(each.source for each in settings.adapters or ())]


def _model_files(settings: ModelSettings, resolved: Mapping[str, ResolvedModel]) -> ModelFiles:
    """`resolved`: the files by the texts of their sources."""
    model = resolved[settings.source]
    projector = None if settings.projector is None else resolved[settings.projector]
    draft = settings.speculation.draft
    adapters = model.adapters
    if settings.adapters is not None:
        adapters = tuple(AdapterPath(resolved[e.source].path, e.scale) for e in settings.adapters)
    options, unsupported = served_options(
        {name: value for name, value in model.parameters.items() if name != "num_ctx"}
    )
    sized, oversized = served_options({"num_ctx": model.parameters.get("num_ctx")})
    system = model.system if settings.system is None else settings.system
    unused = [f"parameter: {reason}" for reason in (*unsupported, *oversized)]
    if model.renderer and model.served_template != model.template:
        unused.append(
            f"template: the model names the renderer {model.renderer[:40]}, which Ollama uses "
            "instead of its template; the template of the GGUF file is used"
        )
    return ModelFiles(
        path=model.path,
        projector=model.projector if projector is None else projector.path,
        projector_required=projector is not None,
        options=options,
        parameters=known_parameters(model.parameters),
        context_tokens=sized.num_ctx,
        prompt_defaults=PromptDefaults(system or None, model.messages),
        template=model.served_template,
        license=model.license,
        stored=model.stored,
        unused=tuple(unused),
        adapters=adapters,
        draft=None if draft is None else resolved[draft].path,
    )


def _logging(model: str, source: str) -> Progress:
    """Logs each step of a pull, and the progress of a blob at intervals."""

    def write(step: PullProgress) -> None:
        amount = {}
        if step.digest is not None:
            percent = round(100 * step.completed / max(1, step.total))
            amount = {"percent": percent, "bytes": step.completed, "total_bytes": step.total}
        log.info("pull", model=model, source=source, status=step.status, **amount)

    return StepWriter(write, every_s=PROGRESS_LOG_S)
