"""Builds a drafter: a draft model with its own cache, on the device of the model it drafts for."""

from collections.abc import Sequence

import torch

from runtime.engine.drafter import Drafter, DraftLimits
from runtime.engine.engine_options import EngineOptions
from runtime.engine.memory_plan import CacheSizes, MemoryOptions, MemoryPlan, sampler_bytes
from runtime.engine.step_budget import StepBudget
from runtime.errors import ConfigurationError
from runtime.kv.cache_layout import CacheLayout
from runtime.kv.cache_manager import KVCacheManager
from runtime.kv.pool import KVPool, cache_bytes
from runtime.worker.input_preparer import StepLimits
from runtime.worker.model import DecoderModel
from runtime.worker.recorded_steps import recorded_bytes
from runtime.worker.runner import DeviceRunner

_BESIDE_PROPOSED = 2  # tokens besides the proposed ones that a slot of the draft model may lack


class DraftPlan:
    """A draft model for `target` on one device, and its memory as `DraftNeeds`.

    `options`: of the engine, whose sizes it shares; `depth`: steps in flight.
    Raises the ConfigurationErrors of `check_draft`.
    """

    def __init__(
        self,
        decoder: DecoderModel,
        target: DecoderModel,
        *,
        device: torch.device,
        options: EngineOptions,
        depth: int,
    ) -> None:
        self._layout = CacheLayout.of(decoder.cache_layers, page_tokens=options.page_tokens)
        check_draft(decoder, target)
        self._decoder, self._target_vocab_size = decoder, target.vocab_size
        self._device, self._options, self._depth = device, options, depth
        limits = options.limits
        self._limits = StepLimits(
            limits.slots,
            limits.step_tokens,
            min(limits.context_tokens, decoder.context_length),
            limits.proposed_tokens,
            limits.proposed_tokens + _BESIDE_PROPOSED,
        )
        self._recorded_bytes = recorded_bytes(
            decoder, self._layout, self._limits, device, cuda_graphs=options.cuda_graphs
        )
        self._sizes = CacheSizes(
            self._layout, MemoryOptions(self._limits, options.kv_dtype, depth=1), checkpoints=0
        )

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weight_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes of the largest step: activations, recorded steps and sampling."""
        limits = self._limits
        activations = self._decoder.activation_bytes(limits.step_tokens, limits.draws)
        sampling = sampler_bytes(self._decoder, self._layout, limits)
        return activations + self._recorded_bytes + sampling

    @property
    def fixed_bytes(self) -> int:
        return self.weight_bytes + self.step_bytes

    def cache_bytes(self, tokens: int) -> int:
        return cache_bytes(self._layout, self._pages(tokens), self._options.kv_dtype)

    def build(self, memory: MemoryPlan, budget: StepBudget | None) -> Drafter:
        """The drafter, with all memory reserved; `memory`: the plan for both models; `budget`: of
        the steps that it drafts for."""
        options, limits, device = self._options, self._limits, self._device
        pages = self._pages(memory.cache_tokens)
        pool = KVPool(
            self._layout,
            pages=pages,
            slots=limits.slots + 1,  # the last one is that of padding
            pages_per_sequence=-(-limits.context_tokens // options.page_tokens),
            type=options.kv_dtype,
            device=device,
        )
        runner = DeviceRunner(
            self._decoder,
            pool,
            self._layout,
            limits,
            device=device,
            recorded_bytes=self._recorded_bytes,
        )
        runner.warm_up(workspace_bytes=self.step_bytes if device.type == "cpu" else None)
        manager = KVCacheManager(
            self._layout.kinds,
            pages,
            page_tokens=options.page_tokens,
            prefix_cache=options.prefix_cache,
        )
        draft_limits = DraftLimits(
            step_tokens=limits.step_tokens,
            draws=limits.draws,
            context_tokens=limits.context_tokens,
            written_tokens=limits.written_tokens,
            vocab_size=self._decoder.vocab_size,
            target_vocab_size=self._target_vocab_size,
            depth=self._depth,
        )
        return Drafter(runner, manager, draft_limits, budget=budget)

    def _pages(self, tokens: int) -> Sequence[int]:
        """Pages of each group for `tokens` cached tokens, at least for one full context."""
        return self._sizes.wanted(max(tokens, self._limits.context_tokens))


def check_draft(draft: DecoderModel, target: DecoderModel) -> None:
    """ConfigurationError if `draft` cannot propose tokens or `target` cannot verify them."""
    name = "`speculation.draft`"
    if not target.generates or any(cache.kind.by_sequence for cache in target.cache_layers):
        raise ConfigurationError(
            f"{name} is given, but this model does not support speculation: it has recurrent "
            "layers, whose states cannot be rolled back, or does not generate text. Remove it."
        )
    if target.cache_devices is not None:
        raise ConfigurationError(
            f"{name} is given, but several devices compute this model; a draft model needs a model "
            "on one device. Remove it."
        )
    unfit = any(cache.kind.by_sequence or cache.kind.by_image for cache in draft.cache_layers)
    if unfit or not draft.generates or not draft.causal:
        raise ConfigurationError(
            f"{name} must be a model that generates text, without recurrent layers and without "
            "cross-attention to images."
        )
