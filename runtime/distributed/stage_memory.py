"""Memory of each device where one process has the layers on several; see `memory_plan`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from runtime.engine.memory_plan import MemoryPlan, VisionBytes, plan_memory
from runtime.kv.spec import CacheGroup, CacheLayout
from runtime.worker.model import DecoderModel


def plan_layer_placement(
    model: DecoderModel,
    layout: CacheLayout,
    *,
    device: torch.device,
    kv_dtype: torch.dtype,
    slots: int,
    step_tokens: int,
    context_tokens: int,
    cache_tokens: int | None,
    memory_bytes: int | None,
    depth: int,
    vision: VisionBytes,
) -> MemoryPlan:
    """As many pages as all devices have room for; arguments and errors as of `plan_memory`.

    What is planned is for `device`, the main one; the other devices' part is in `others_bytes`.
    `memory_bytes` is what may be used of each.
    """
    assert model.cache_devices is not None
    parts = [device, *(d for d in dict.fromkeys(model.cache_devices) if d != device)]
    layouts = [_held(layout, model.cache_devices, part) for part in parts]
    plans = [
        plan_memory(
            _Part(model, part, main=part == device),
            held,
            device=part,
            kv_dtype=kv_dtype,
            slots=slots,
            step_tokens=step_tokens,
            context_tokens=context_tokens,
            cache_tokens=cache_tokens,
            memory_bytes=memory_bytes,
            depth=depth,
            vision=vision if part == device else VisionBytes(),
        )
        for part, held in zip(parts, layouts, strict=True)
    ]
    pages = [min(counts) for counts in zip(*(plan.pages for plan in plans), strict=True)]
    tokens = min(plan.cache_tokens for plan in plans)
    own, *others = [
        plan.with_pages(pages, held, kv_dtype, cache_tokens=tokens)
        for plan, held in zip(plans, layouts, strict=True)
    ]
    return replace(own, others_bytes=sum(plan.reserved_bytes for plan in others))


def _held(
    layout: CacheLayout, devices: Sequence[torch.device], device: torch.device
) -> CacheLayout:
    """All groups, each with the layers that are there."""
    groups = tuple(
        CacheGroup(group.cache, tuple(layer for layer in group.layers if devices[layer] == device))
        for group in layout.groups
    )
    return CacheLayout(groups, layout.page_tokens)


@dataclass(frozen=True, slots=True)
class _Part:
    """A model as one device sees it; tokens are drawn on the main one alone."""

    model: DecoderModel
    device: torch.device
    main: bool

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size if self.main else 0

    @property
    def hidden_size(self) -> int:
        return self.model.hidden_size

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes_on(self.device)

    def activation_bytes(self, tokens: int, outputs: int) -> int:
        return self.model.activation_bytes(tokens, outputs)
