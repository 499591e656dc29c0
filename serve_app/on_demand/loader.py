"""Models of the store for a pool: found by name, measured, loaded and unloaded."""

import dataclasses
import gc
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock

import torch

from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store, default_root
from runtime.engine.assembly import EngineOptions, foresee
from runtime.engine.memory_plan import LEFT_FREE, available_bytes
from runtime.errors import CaravanError, ModelNotFoundError, SourceError, StoreError
from runtime.vision.encoder import ForeseenEncoder
from serve_app.config.settings import ModelSettings
from serve_app.gateway.model_card import ModelCard
from serve_app.on_demand.model_pool import Found, Sizes
from serve_app.on_demand.settings import OnDemandSettings
from serve_app.replica.loading import DEFAULT_CONTEXT_TOKENS, Outline, load_outline, load_replica
from serve_app.replica.machine import computing_device
from serve_app.replica.replica import ModelReplica, model_card, verbose_card
from serve_app.replica.resolved_model import ModelFiles, present_origin, told_of
from serve_app.replica.startup_log import log_reduced_context

NO_LIMIT = 1 << 62
OUTLINES_KEPT = 64


class StoreLoader:
    """See model_pool.Loader.

    A model is served with the context that its parameters ask for (`num_ctx`), else with that of
    the settings, as far as it was trained for that and as there is room in `max_loaded_bytes`:
    what the settings say, or else what was free when this was made.
    """

    def __init__(
        self, settings: OnDemandSettings, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._settings = settings
        self._environment = environment
        self._store = Store(default_root(environment))
        self._device = computing_device(settings.model.device, settings.model.threads)
        self._outlines: OrderedDict[Found, tuple[ModelCard, Sizes]] = OrderedDict()
        self._outlines_lock = Lock()
        self.max_loaded_bytes = self._most_bytes()

    def find(self, name: str) -> Found:
        try:
            known = self._store.find(ModelName.parse(name))
            if known is not None:
                return Found(str(known), self._store.manifest(known).digest)
        except (SourceError, StoreError):
            pass
        raise ModelNotFoundError(f"model '{name}' not found")

    def outline(self, found: Found, verbose: bool = False) -> tuple[ModelCard, Sizes]:
        """Threads may do so at once: a description must not hold up a load."""
        with self._outlines_lock:
            known = self._outlines.get(found)
            if known is not None:
                self._outlines.move_to_end(found)
        if known is not None and not verbose:
            return known
        outline = self._fitting(found)
        known = _card(found, outline), _sizes(outline)
        with self._outlines_lock:
            card, sizes = self._outlines.setdefault(found, known)
            while len(self._outlines) > OUTLINES_KEPT:
                self._outlines.popitem(last=False)
        return (verbose_card(card, outline.model) if verbose else card), sizes

    def load(self, found: Found, memory_bytes: int) -> ModelReplica:
        card, _ = self.outline(found)
        settings = self._model_settings(found, memory_bytes, card.context_tokens)
        origin = self._origin(settings)
        if origin.context_tokens is not None and card.context_tokens < origin.context_tokens:
            trained = card.context_tokens == card.context_length
            room = f"`on_demand.max_loaded_bytes` is {self.max_loaded_bytes:,}"
            log_reduced_context(
                found.name,
                asked=origin.context_tokens,
                served=card.context_tokens,
                reason="the model was trained for no more" if trained else room,
            )
        return load_replica(settings, origin=dataclasses.replace(origin, context_tokens=None))

    def unload(self, replica: ModelReplica) -> None:
        replica.close()
        del replica
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        return int(available_bytes(self._device) * (1 - LEFT_FREE))

    def _most_bytes(self) -> int:
        stated = self._settings.max_loaded_bytes
        if stated is not None:
            return stated
        gpus = self._settings.num_gpus
        shared = self._device.type == "cuda" and gpus is not None and 0 < gpus < 1
        return int(self.free_bytes() * (gpus if shared and gpus else 1.0))

    def _fitting(self, found: Found) -> Outline:
        """With the longest context up to the one that is asked for that has room.

        It is not cut below the context of models that ask for none: one that has no room for that
        is refused by the pool.
        """
        outline = self._outlined(found, None)
        asked = outline.options.context_tokens
        least = min(asked, self._common_context)
        if asked == least or _least_bytes(outline, asked) <= self.max_loaded_bytes:
            return outline
        tokens = range(least, asked, outline.options.page_tokens)
        fitting = bisect_right(
            tokens, self.max_loaded_bytes, key=lambda count: _least_bytes(outline, count)
        )
        return self._outlined(found, tokens[max(0, fitting - 1)])

    def _outlined(self, found: Found, context_tokens: int | None) -> Outline:
        """`context_tokens` None: those that the model asks for, or the common ones."""
        settings = self._model_settings(found, NO_LIMIT, context_tokens)
        origin = self._origin(settings)
        asked = origin.context_tokens or self._common_context
        return load_outline(settings, dataclasses.replace(origin, context_tokens=asked))

    def _origin(self, settings: ModelSettings) -> ModelFiles:
        try:
            origin = present_origin(settings, self._environment)
        except CaravanError as error:
            raise type(error)(f"Model {settings.name}: {error}") from None
        if origin is None:
            raise ModelNotFoundError(
                f"model '{settings.name}' is not whole in the store any more; pull it again"
            )
        return origin

    @property
    def _common_context(self) -> int:
        return self._settings.model.context_tokens or DEFAULT_CONTEXT_TOKENS

    def _model_settings(
        self, found: Found, memory_bytes: int, context_tokens: int | None
    ) -> ModelSettings:
        # The common defaults are for requests, and a model may have less context than they say.
        common = self._settings.model.model_dump(exclude={"context_tokens", "defaults"})
        settings = ModelSettings(
            name="stored",
            source=f"ollama://{found.name}",
            context_tokens=context_tokens,
            memory_bytes=memory_bytes,
            **common,
        )
        # Names in the store may have what configured ones may not, such as a port.
        return settings.model_copy(update={"name": found.name})


def _sizes(outline: Outline) -> Sizes:
    """With a cache for one context, and for as many as run at once."""
    least = _least_bytes(outline, outline.options.context_tokens)
    return Sizes(least, max(least, _bytes(outline, outline.options)))


def _least_bytes(outline: Outline, context_tokens: int) -> int:
    """What the model takes with a cache for one context of that length."""
    options = dataclasses.replace(
        outline.options, context_tokens=context_tokens, cache_tokens=context_tokens
    )
    return _bytes(outline, options)


def _bytes(outline: Outline, options: EngineOptions) -> int:
    tower = outline.model.tower
    return foresee(
        outline.model.decoder,
        device=outline.device,
        options=dataclasses.replace(options, memory_bytes=NO_LIMIT),
        encoder=None if tower is None else ForeseenEncoder.of(tower, outline.device),
    ).reserved_bytes


def _card(found: Found, outline: Outline) -> ModelCard:
    card = model_card(
        outline.model,
        name=found.name,
        context_tokens=outline.options.context_tokens,
        device=outline.device.type,
        reserved_bytes=0,
    )
    return told_of(card, outline.origin)
