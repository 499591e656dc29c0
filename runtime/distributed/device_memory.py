"""Memory plans where one process has its layers on several devices; see `memory_plan`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from runtime.engine.memory_plan import (
    MemoryOptions,
    MemoryPlan,
    VisionBytes,
    plan_memory,
    state_bytes,
)
from runtime.kv.cache_layout import CacheGroup, CacheLayout
from runtime.worker.model import DecoderModel


def plan_memory_per_device(
    model: DecoderModel, layout: CacheLayout, device: torch.device, options: MemoryOptions
) -> MemoryPlan:
    """As many pages as every device has memory for; errors as of `plan_memory`.

    The plan is that of the main `device`, which also encodes images; `others_bytes` is what the
    other devices reserve. `memory_bytes` applies to each device, `state_checkpoint_bytes` to all of
    them together.
    """
    assert model.cache_devices is not None and model.layer_devices is not None
    assert options.device_ranks == 1
    options = replace(options, set_aside_bytes=0, cuda_graphs=False)
    devices = list(dict.fromkeys((device, *model.layer_devices)))
    layouts = [_layout_on(layout, model.cache_devices, each) for each in devices]
    plans = [
        plan_memory(
            _DeviceShare(model, each, main=each == device),
            held,
            each,
            replace(
                options,
                vision=options.vision if each == device else VisionBytes(),
                state_checkpoint_bytes=_checkpoint_share(layout, held, options),
            ),
        )
        for each, held in zip(devices, layouts, strict=True)
    ]
    pages = [_least_pages(number, plans, layouts) for number in range(len(layout.groups))]
    tokens = min(plan.cache_tokens for plan in plans)
    own, *others = [
        plan.with_pages(pages, held, options.kv_dtype, cache_tokens=tokens)
        for plan, held in zip(plans, layouts, strict=True)
    ]
    return replace(
        own,
        others_bytes=sum(plan.reserved_bytes for plan in others),
        least_bytes=max(plan.least_bytes for plan in plans),
    )


def _layout_on(
    layout: CacheLayout, devices: Sequence[torch.device], device: torch.device
) -> CacheLayout:
    """All groups, each with only the layers on `device`."""
    groups = tuple(
        CacheGroup(group.cache, tuple(layer for layer in group.layers if devices[layer] == device))
        for group in layout.groups
    )
    return CacheLayout(groups, layout.page_tokens)


def _least_pages(group: int, plans: Sequence[MemoryPlan], layouts: Sequence[CacheLayout]) -> int:
    """The fewest pages of a group on a device that has layers of it."""
    parts = zip(plans, layouts, strict=True)
    return min(plan.pages[group] for plan, held in parts if held.groups[group].layers)


def _checkpoint_share(layout: CacheLayout, held: CacheLayout, options: MemoryOptions) -> int | None:
    """The part of the bytes for checkpoints that a device with the layers of `held` may spend; None
    if they are not given."""
    whole, budget = state_bytes(layout, options.kv_dtype), options.state_checkpoint_bytes
    if budget is None or not whole:
        return budget
    return budget * state_bytes(held, options.kv_dtype) // whole


@dataclass(frozen=True, slots=True)
class _DeviceShare:
    """The part of a model on one device, as a `ModelSizes`. Tokens are sampled on the main device
    only, so the others plan with a vocabulary of 0 tokens."""

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
