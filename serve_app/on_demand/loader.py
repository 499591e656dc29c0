"""Models of the store for a pool: found by name, measured, loaded and unloaded."""

import dataclasses
import gc
import os
from collections import OrderedDict
from collections.abc import Mapping

import torch

from model_zoo.model_name import ModelName
from model_zoo.store import Store, default_root
from runtime.assembly import foresee
from runtime.errors import CaravanError, ModelNotFoundError, SourceError, StoreError
from runtime.memory import LEFT_FREE, available_bytes
from runtime.vision import ForeseenEncoder
from serve_app.card import ModelCard
from serve_app.loading import Outline, load_outline, load_replica
from serve_app.machine import computing_device
from serve_app.on_demand.model_pool import Found, Sizes
from serve_app.on_demand.settings import OnDemandSettings
from serve_app.origin import Origin, present_origin, told_of
from serve_app.replica import ModelReplica, model_card, verbose_card
from serve_app.settings import ModelSettings

NO_LIMIT = 1 << 62
OUTLINES_KEPT = 64


class StoreLoader:
    """See model_pool.Loader."""

    def __init__(
        self, settings: OnDemandSettings, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._settings = settings
        self._environment = environment
        self._store = Store(default_root(environment))
        self._device = computing_device(settings.model.device, settings.model.threads)
        self._outlines: OrderedDict[Found, tuple[ModelCard, Sizes]] = OrderedDict()

    @property
    def max_loaded_bytes(self) -> int:
        """What the settings say, or else what is free now."""
        stated = self._settings.max_loaded_bytes
        if stated is not None:
            return stated
        gpus = self._settings.num_gpus
        shared = self._device.type == "cuda" and gpus is not None and 0 < gpus < 1
        return int(self.free_bytes() * (gpus if shared and gpus else 1.0))

    def find(self, name: str) -> Found:
        try:
            known = self._store.find(ModelName.parse(name))
            if known is not None:
                return Found(str(known), self._store.manifest(known).digest)
        except (SourceError, StoreError):
            pass
        raise ModelNotFoundError(f"model '{name}' not found")

    def outline(self, found: Found, verbose: bool = False) -> tuple[ModelCard, Sizes]:
        known = self._outlines.get(found)
        if known is not None and not verbose:
            self._outlines.move_to_end(found)
            return known
        settings = self._model_settings(found, NO_LIMIT)
        outline = load_outline(settings, self._origin(settings))
        card, sizes = _card(found, outline), _sizes(outline)
        self._outlines.setdefault(found, (card, sizes))
        while len(self._outlines) > OUTLINES_KEPT:
            self._outlines.popitem(last=False)
        return (verbose_card(card, outline.model) if verbose else card), sizes

    def load(self, found: Found, memory_bytes: int) -> ModelReplica:
        settings = self._model_settings(found, memory_bytes)
        return load_replica(settings, origin=self._origin(settings))

    def unload(self, replica: ModelReplica) -> None:
        replica.close()
        del replica
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        return int(available_bytes(self._device) * (1 - LEFT_FREE))

    def _origin(self, settings: ModelSettings) -> Origin:
        try:
            origin = present_origin(settings, self._environment)
        except CaravanError as error:
            raise type(error)(f"Model {settings.name}: {error}") from None
        if origin is None:
            raise ModelNotFoundError(
                f"model '{settings.name}' is not whole in the store any more; pull it again"
            )
        return origin

    def _model_settings(self, found: Found, memory_bytes: int) -> ModelSettings:
        common = self._settings.model.model_dump()
        source = f"ollama://{found.name}"
        settings = ModelSettings(name="stored", source=source, memory_bytes=memory_bytes, **common)
        # Names in the store may have what configured ones may not, such as a port.
        return settings.model_copy(update={"name": found.name})


def _sizes(outline: Outline) -> Sizes:
    """With a cache for one context, and for as many as run at once."""
    tower = outline.model.tower
    encoder = None if tower is None else ForeseenEncoder.of(tower, outline.device)
    options = dataclasses.replace(outline.options, memory_bytes=NO_LIMIT)
    least, full = (
        foresee(
            outline.model.decoder,
            device=outline.device,
            options=dataclasses.replace(options, cache_tokens=tokens),
            encoder=encoder,
        ).reserved_bytes
        for tokens in (options.context_tokens, options.cache_tokens)
    )
    return Sizes(least, max(least, full))


def _card(found: Found, outline: Outline) -> ModelCard:
    card = model_card(
        outline.model,
        name=found.name,
        context_tokens=outline.options.context_tokens,
        device=outline.device.type,
        reserved_bytes=0,
    )
    return told_of(card, outline.origin)
