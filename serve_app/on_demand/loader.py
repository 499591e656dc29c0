"""Finds, plans, loads and unloads models of the store for a pool."""

import dataclasses
import gc
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock

import torch

from model_zoo.gguf.shared_weights import SharedWeights
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store, default_root
from runtime.engine.memory_plan import LEFT_FREE, available_bytes
from runtime.errors import (
    CaravanError,
    ModelNotFoundError,
    OverloadedError,
    SourceError,
    StoreError,
)
from serve_app.config.on_demand_settings import OnDemandSettings
from serve_app.config.settings import ModelSettings
from serve_app.messages.model_card import ModelCard
from serve_app.on_demand.model_pool import MemoryNeed
from serve_app.on_demand.pooled_model import StoredVersion
from serve_app.replica.device_setup import computing_device
from serve_app.replica.load_errors import named_errors
from serve_app.replica.loading import DEFAULT_CONTEXT_TOKENS, load_replica, plan_model
from serve_app.replica.model_cards import model_card, verbose_card
from serve_app.replica.model_files import ModelFiles, local_files
from serve_app.replica.model_plan import ModelPlan
from serve_app.replica.replica import ModelReplica
from serve_app.replica.startup_log import log_reduced_context

NO_LIMIT = 1 << 62
OUTLINES_KEPT = 64


def find_version(store: Store, name: str) -> StoredVersion:
    """ModelNotFoundError if the name is invalid or the store has no such model. StoreError if the
    store cannot be read."""
    with suppress(SourceError):
        known = store.find(ModelName.parse(name))
        if known is not None:
            with suppress(StoreError):  # it is removed now
                return StoredVersion(str(known), store.manifest(known).digest)
    raise ModelNotFoundError(f"model '{name}' not found")


class StoreLoader:
    """Implements model_pool.Loader.

    A model is served with the context of its parameter `num_ctx`, or else of the settings, limited
    by the context that it was trained for and by `max_loaded_bytes`: that of the settings, or else
    the memory that was free when the loader was created.
    """

    def __init__(
        self, settings: OnDemandSettings, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._settings = settings
        self._environment = environment
        self._store = Store(default_root(environment))
        self._device = computing_device(settings.model.device, settings.model.threads)
        self._outlines: OrderedDict[StoredVersion, tuple[ModelCard, MemoryNeed]] = OrderedDict()
        self._outlines_lock = Lock()
        self._weights = SharedWeights()
        self.max_loaded_bytes = self._memory_limit()

    def find(self, name: str) -> StoredVersion:
        return find_version(self._store, name)

    def outline(
        self, version: StoredVersion, verbose: bool = False
    ) -> tuple[ModelCard, MemoryNeed]:
        """Reads the headers only. Safe for several threads: a description must not delay a load."""
        with self._outlines_lock:
            known = self._outlines.get(version)
            if known is not None:
                self._outlines.move_to_end(version)
        if known is not None and not verbose:
            return known
        outline = self._fitting(version)
        known = model_card(outline, version.name, reserved_bytes=0), _memory_need(outline)
        with self._outlines_lock:
            card, need = self._outlines.setdefault(version, known)
            while len(self._outlines) > OUTLINES_KEPT:
                self._outlines.popitem(last=False)
        return (verbose_card(card, outline.model) if verbose else card), need

    def load(self, version: StoredVersion, memory_bytes: int) -> ModelReplica:
        card, _ = self.outline(version)
        settings = self._model_settings(version, memory_bytes, card.context_tokens)
        origin = self._origin(version, settings)
        if origin.context_tokens is not None and card.context_tokens < origin.context_tokens:
            trained = card.context_tokens == card.context_length
            limit = f"`on_demand.max_loaded_bytes` is {self.max_loaded_bytes:,}"
            log_reduced_context(
                version.name,
                requested=origin.context_tokens,
                served=card.context_tokens,
                reason="the model was trained for this context" if trained else limit,
            )
        files = dataclasses.replace(origin, context_tokens=None)
        return load_replica(settings, files=files, shared=self._weights)

    def unload(self, replica: ModelReplica) -> None:
        replica.close()

    def reclaim(self) -> None:
        gc.collect()  # references between an engine and its parts are circular
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def free_bytes(self, shared_bytes: int = 0) -> int:
        free = int(available_bytes(self._device) * (1 - LEFT_FREE))
        # On a CPU, weights are pages of files, which count as free.
        return free + (shared_bytes if self._device.type == "cuda" else 0)

    def _memory_limit(self) -> int:
        stated = self._settings.max_loaded_bytes
        if stated is not None:
            return stated
        gpus = self._settings.num_gpus
        shared = self._device.type == "cuda" and gpus is not None and 0 < gpus < 1
        return int(self.free_bytes() * (gpus if shared and gpus else 1.0))

    def _fitting(self, version: StoredVersion) -> ModelPlan:
        """The model with the longest context that fits, up to the requested one.

        The context is not reduced below the default for models that request none; the pool refuses
        a model that does not fit with that.
        """
        outline = self._outlined(version, None)
        requested = outline.options.context_tokens
        shortest = min(requested, self._common_context)
        if requested == shortest or _minimum_bytes(outline, requested) <= self.max_loaded_bytes:
            return outline
        tokens = range(shortest, requested, outline.options.page_tokens)
        fitting = bisect_right(
            tokens, self.max_loaded_bytes, key=lambda count: _minimum_bytes(outline, count)
        )
        return self._outlined(version, tokens[max(0, fitting - 1)])

    def _outlined(self, version: StoredVersion, context_tokens: int | None) -> ModelPlan:
        """`context_tokens` None: the context that the model requests, or else that of the
        settings."""
        settings = self._model_settings(version, NO_LIMIT, context_tokens)
        origin = self._origin(version, settings)
        requested = origin.context_tokens or self._common_context
        with named_errors(f"Model {settings.name}"):
            return plan_model(settings, dataclasses.replace(origin, context_tokens=requested))

    def _origin(self, version: StoredVersion, settings: ModelSettings) -> ModelFiles:
        """The files of the version. OverloadedError if the name has another one by now."""
        try:
            origin = local_files(settings, self._environment)
        except CaravanError as error:
            raise type(error)(f"Model {settings.name}: {error}") from None
        if origin is None:
            raise ModelNotFoundError(
                f"model '{settings.name}' is incomplete in the store; pull it again"
            )
        assert origin.stored is not None
        if origin.stored.manifest.digest != version.digest:
            raise OverloadedError(
                f"model '{version.name}' was replaced in the store while it was read; try again"
            )
        return origin

    @property
    def _common_context(self) -> int:
        return self._settings.model.context_tokens or DEFAULT_CONTEXT_TOKENS

    def _model_settings(
        self, version: StoredVersion, memory_bytes: int, context_tokens: int | None
    ) -> ModelSettings:
        # Defaults apply to requests, and a model may have a shorter context than the settings.
        common = self._settings.model.model_dump(exclude={"context_tokens", "defaults"})
        settings = ModelSettings(
            name="stored",
            source=f"ollama://{version.name}",
            context_tokens=context_tokens,
            memory_bytes=memory_bytes,
            **common,
        )
        # Set afterwards, because names in the store may have parts that configured names may not,
        # such as a port.
        return settings.model_copy(update={"name": version.name})


def _memory_need(outline: ModelPlan) -> MemoryNeed:
    plan = outline.memory(outline.options)
    base = str(outline.files.path.resolve())
    facts = outline.model.description
    shared = min(facts.matrix_bytes, facts.weight_bytes)
    return MemoryNeed(plan.least_bytes, plan.reserved_bytes, base, shared)


def _minimum_bytes(outline: ModelPlan, context_tokens: int) -> int:
    """The fewest bytes with which the model can be served with contexts of that length."""
    options = dataclasses.replace(outline.options, context_tokens=context_tokens)
    return outline.memory(options).least_bytes
