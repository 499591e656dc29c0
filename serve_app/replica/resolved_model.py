"""Where a configured model's files are, and what a model that was pulled brings beside them."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from model_zoo.chat.template_language import is_go_template
from model_zoo.sources.pull import PullProgress
from model_zoo.sources.reference import PathSource, parse_source
from model_zoo.sources.resolve import ResolvedModel, facts, resolve, stored_model
from model_zoo.store.store import Store, StoredModel, default_root
from serve_app.config.options import Options, served_options
from serve_app.config.parameters import known_parameters
from serve_app.config.settings import ModelSettings, source_path
from serve_app.gateway.model_card import ModelCard
from serve_app.logs import get_logger
from serve_app.replica.prompt_defaults import PromptDefaults

PULLING_EVERY_S = 2.0

log = get_logger()


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's files on this machine; settings go before what it brings itself.

    `projector_wanted`: it was configured, so that a model without it would not do. `options`,
    `context_tokens` and `template`, which is Jinja, are the model's own; `parameters` are all of
    its options, with those that are not served. `stored`: what the store
    has of it, None for a path. `left_alone`: what it brings and is not used, in words for the log.
    """

    path: Path
    projector: Path | None = None
    projector_wanted: bool = False
    options: Options = field(default_factory=Options)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    context_tokens: int | None = None
    opening: PromptDefaults = field(default_factory=PromptDefaults)
    template: str | None = None
    license: str | None = None
    stored: StoredModel | None = None
    left_alone: tuple[str, ...] = ()

    def without(self, what: str, reason: Exception) -> "ModelFiles":
        """The same without its projector, or without its template."""
        left_alone = (*self.left_alone, f"{what}: {reason}")
        return replace(self, **{what: None}, left_alone=left_alone)  # type: ignore[arg-type]


def present_origin(settings: ModelSettings, environment: Mapping[str, str]) -> ModelFiles | None:
    """The origin, unless something of it has to be pulled first."""
    store = Store(default_root(environment))
    model = _present(settings.source, store)
    projector = None if settings.projector is None else _present(settings.projector, store)
    if model is None or (settings.projector is not None and projector is None):
        return None
    return _origin(settings, model, projector)


def fetched_origin(settings: ModelSettings, environment: Mapping[str, str]) -> ModelFiles:
    """The origin; what is not in the store is pulled, with a line now and then.

    SourceError when it cannot be had, StoreError when it cannot be kept.
    """
    store = Store(default_root(environment))

    def resolved(source: str) -> ResolvedModel:
        progress = _Progress(settings.name, source)
        present = _present(source, store)
        return present or resolve(source, store, progress=progress, environment=environment)

    projector = None if settings.projector is None else resolved(settings.projector)
    return _origin(settings, resolved(settings.source), projector)


def told_of(card: ModelCard, origin: ModelFiles) -> ModelCard:
    """The card of the model's file with what the model brings beside it."""
    stored = origin.stored
    if stored is not None:
        card = replace(
            card,
            file_bytes=stored.manifest.size_bytes,
            digest=stored.manifest.digest,
            modified_at=stored.modified_at,
        )
    return replace(
        card,
        system=origin.opening.system,
        messages=tuple((each.role, each.text) for each in origin.opening.messages),
        options=origin.options,
        parameters=origin.parameters,
        license=origin.license or card.license,
    )


def comes_later(settings: ModelSettings, environment: Mapping[str, str]) -> str:
    """What to say of a model that `present_origin` does not find."""
    sources = settings.source + (f" with {settings.projector}" if settings.projector else "")
    return (
        f"Model {settings.name}: {sources} is not in the store {default_root(environment)} of this "
        "machine; whichever node serves it pulls it when it starts, and checks it then."
    )


def _present(text: str, store: Store) -> ResolvedModel | None:
    source = parse_source(text)
    if isinstance(source, PathSource):
        return ResolvedModel(source_path(text))
    stored = stored_model(source, store)
    return None if stored is None else facts(stored, store)


def _origin(
    settings: ModelSettings, model: ResolvedModel, projector: ResolvedModel | None
) -> ModelFiles:
    options, refused = served_options(
        {name: value for name, value in model.parameters.items() if name != "num_ctx"}
    )
    sized, oversized = served_options({"num_ctx": model.parameters.get("num_ctx")})
    system = model.system if settings.system is None else settings.system
    left_alone = [f"parameter: {reason}" for reason in (*refused, *oversized)]
    template = model.template
    if template is not None and is_go_template(template):
        template = None
        left_alone.append("template: it is in the template language of Go; the file's own is used")
    return ModelFiles(
        path=model.path,
        projector=model.projector if projector is None else projector.path,
        projector_wanted=projector is not None,
        options=options,
        parameters=known_parameters(model.parameters),
        context_tokens=sized.num_ctx,
        opening=PromptDefaults(system or None, model.messages),
        template=template,
        license=model.license,
        stored=model.stored,
        left_alone=tuple(left_alone),
    )


class _Progress:
    """Says what a pull does: each new step, and how far a blob is now and then."""

    def __init__(self, model: str, source: str) -> None:
        self._known = {"model": model, "source": source}
        self._step: tuple[str, str | None] | None = None
        self._due = 0.0

    def __call__(self, progress: PullProgress) -> None:
        step, now = (progress.status, progress.digest), time.monotonic()
        if step == self._step and now < self._due and progress.completed < progress.total:
            return
        self._step, self._due = step, now + PULLING_EVERY_S
        amount = {}
        if progress.digest is not None:
            percent = round(100 * progress.completed / max(1, progress.total))
            amount = {"percent": percent, "bytes": progress.completed}
            amount["total_bytes"] = progress.total
        log.info("pull", **self._known, status=progress.status, **amount)
