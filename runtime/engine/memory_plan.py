"""Worst-case memory of a model, computed once at start; refuses what does not fit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from runtime.errors import DoesNotFitError
from runtime.host_limits import free_host_bytes
from runtime.kv.cache_layout import CacheLayout
from runtime.kv.cache_types import CacheType
from runtime.kv.pool import cache_bytes, page_bytes
from runtime.worker.input_preparer import StepLimits, buffer_bytes
from runtime.worker.mask_worker import buffer_bytes as mask_bytes
from runtime.worker.model import ModelSizes
from runtime.worker.pooling import Pooler
from runtime.worker.recorded_steps import recorded_bytes
from runtime.worker.sampler import Sampler
from runtime.worker.step_results import result_bytes

# Share of the measured memory that stays free, for other processes and for fragmentation.
LEFT_FREE = 0.1
# By default, if an eighth of the cache's memory holds them.
CHECKPOINTS_PER_SLOT = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and the number of pages of each cache group.

    `vision_bytes`: workspace of the image encoder, and cached image features.
    `available_bytes`: all that the engine may use, weights included; `headroom_bytes` of it stay
    free. `cache_tokens`: positions that the cache holds in total. `others_bytes`: reserved by other
    processes, or on other devices, for the same model. `recorded_bytes`: the part of
    `activation_bytes` for recorded steps. `draft_bytes`: of the draft model, its cache included.
    `least_bytes`: the smallest `memory_bytes` that is not refused, with which the cache holds one
    context, unless `cache_tokens` are given, and one sequence runs at once if it has states.
    """

    weight_bytes: int
    activation_bytes: int
    vision_bytes: int
    sampler_bytes: int
    cache_bytes: int
    available_bytes: int
    headroom_bytes: int
    pages: tuple[int, ...]
    cache_tokens: int
    others_bytes: int = 0
    recorded_bytes: int = 0
    draft_bytes: int = 0
    least_bytes: int = 0

    @property
    def step_bytes(self) -> int:
        """Upper bound of the memory of a step."""
        return self.activation_bytes + self.sampler_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.available_bytes - self.headroom_bytes

    def with_pages(
        self, pages: Sequence[int], layout: CacheLayout, type: CacheType, *, cache_tokens: int
    ) -> "MemoryPlan":
        """This plan with fewer pages, which hold `cache_tokens`."""
        cache = cache_bytes(layout, pages, type)
        return replace(
            self,
            cache_bytes=cache,
            headroom_bytes=self.headroom_bytes + self.cache_bytes - cache,
            pages=tuple(pages),
            cache_tokens=cache_tokens,
        )


@dataclass(frozen=True, slots=True)
class VisionBytes:
    """Bytes of image encoding on the device: weights, and the largest workspace with features."""

    weights: int = 0
    workspace: int = 0


class DraftNeeds(Protocol):
    """Bytes of a draft model: `weight_bytes`; `fixed_bytes`, weights and the largest step;
    `cache_bytes`, a cache for `tokens`, as many as the model's own cache holds."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def fixed_bytes(self) -> int: ...

    def cache_bytes(self, tokens: int) -> int: ...


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What the plan depends on besides model and device.

    `cache_tokens` None: the cache takes as much as is useful and free. `memory_bytes`: used to the
    last byte; None: the memory that is free, less `set_aside_bytes` for others and a tenth.
    `state_checkpoint_bytes`: for checkpoints of recurrent states; None: a share of what is free.
    `device_ranks`: ranks that allocate from the same memory; each gets an equal share of what is
    measured. `depth`: steps in flight; until one retires, its sequences keep the pages that earlier
    rows could see. `cuda_graphs`: memory for `step_graphs`.
    """

    limits: StepLimits
    kv_dtype: CacheType
    cache_tokens: int | None = None
    memory_bytes: int | None = None
    depth: int = 2
    vision: VisionBytes = VisionBytes()
    cuda_graphs: bool = False
    device_ranks: int = 1
    set_aside_bytes: int = 0
    state_checkpoint_bytes: int | None = 0
    draft: DraftNeeds | None = None


def plan_memory(
    model: ModelSizes, layout: CacheLayout, device: torch.device, options: MemoryOptions
) -> MemoryPlan:
    """Divide the memory of `device` among weights, activations, images, sampler and cache.

    Raises DoesNotFitError when the cache cannot hold one full context beside the rest.
    """
    limits, vision = options.limits, options.vision
    weights = model.weight_bytes + vision.weights
    activations = model.activation_bytes(limits.step_tokens, limits.draws)
    recorded = recorded_bytes(model, layout, limits, device, cuda_graphs=options.cuda_graphs)
    sampler, draft = sampler_bytes(model, layout, limits), options.draft
    all_weights = weights + (draft.weight_bytes if draft else 0)
    available, usable = _memory(options, device, all_weights)
    activations += recorded
    room = usable - weights - activations - vision.workspace - sampler
    room -= draft.fixed_bytes if draft else 0
    fixed = usable - room
    cache = CacheSizes(layout, options, checkpoints=_checkpoints(layout, options, room))
    tokens = cache.tokens_within(room) if options.cache_tokens is None else options.cache_tokens
    _check_one_context(tokens, limits.context_tokens)
    beside = draft.cache_bytes(tokens) if draft else 0
    room -= beside
    pages = cache.pages(tokens, room)
    plan = MemoryPlan(
        weights,
        activations,
        vision.workspace,
        sampler,
        cache.nbytes(pages),
        available,
        available - usable + room - cache.nbytes(pages),
        pages,
        cache.held(tokens),
        recorded_bytes=recorded,
        draft_bytes=draft.fixed_bytes + beside if draft else 0,
        least_bytes=fixed + cache.least_bytes(options.cache_tokens or limits.context_tokens),
    )
    if plan.cache_bytes > room:
        _, without = _memory(replace(options, set_aside_bytes=0), device, all_weights)
        refusal = _refusal(plan, device, usable, options)
        raise DoesNotFitError(f"{refusal} {_advice(all_weights, usable, without)}")
    return plan


def _memory(options: MemoryOptions, device: torch.device, all_weights: int) -> tuple[int, int]:
    """The bytes that are available, and those of them that may be used."""
    if options.memory_bytes is not None:
        return options.memory_bytes, options.memory_bytes
    measured = _measured(device, all_weights) - options.set_aside_bytes
    available = max(0, measured) // options.device_ranks
    return available, int(available * (1 - LEFT_FREE))


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated: on a CPU, within the machine and its control groups."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + kept
    return free_host_bytes()


class CacheSizes:
    """Pages of each cache group, and their bytes, for a number of cached tokens.

    A group with a window needs a bounded number of pages per sequence, so it stops growing once
    every slot has its bound; the steps in flight are shared by all slots. A group with one state
    per sequence needs one page per slot, however short the sequences are, and one for each of
    `checkpoints`.
    """

    def __init__(self, layout: CacheLayout, options: MemoryOptions, *, checkpoints: int) -> None:
        type, slots = options.kv_dtype, options.limits.slots
        context_tokens = options.limits.context_tokens
        in_flight = options.depth * options.limits.step_tokens
        self._page_tokens = layout.page_tokens
        self._slots = slots
        self._layout, self._type = layout, type
        self._context_pages = -(-context_tokens // layout.page_tokens)
        self._whole = layout.capacity_pages(context_tokens)
        self._one = layout.held_pages(context_tokens, in_flight)
        # The rows in flight of each slot may start on a partly filled page.
        resting = (pages + 1 for pages in layout.held_pages(context_tokens, 0))
        flying = -(-in_flight // layout.page_tokens)
        self._all = tuple(
            min(slots * one, slots * rest + flying)
            for one, rest in zip(self._one, resting, strict=True)
        )
        self._by_sequence = tuple(kind.by_sequence for kind in layout.kinds)
        self._states = slots + checkpoints
        self._draft = options.draft

    @property
    def most_tokens(self) -> int:
        """Every slot with a full context; more can never be in use."""
        return self._slots * self._context_pages * self._page_tokens

    def tokens_within(self, budget: int) -> int:
        """The largest number of tokens whose pages fit into `budget`, with those of a draft model;
        at least one full context."""
        low, high = self._context_pages, self._slots * self._context_pages
        while low < high:
            middle = (low + high + 1) // 2
            tokens = middle * self._page_tokens
            beside = self._draft.cache_bytes(tokens) if self._draft else 0
            if self.nbytes(self.wanted(tokens)) + beside <= budget:
                low = middle
            else:
                high = middle - 1
        return low * self._page_tokens

    def pages(self, tokens: int, budget: int) -> tuple[int, ...]:
        """Pages for `tokens`. If they exceed `budget` bytes, groups with a window or with states
        get fewer, down to the bound of one sequence."""
        wanted = self.wanted(tokens)
        low, high = 0, max(wanted)
        while low < high:
            middle = high - (high - low) // 2
            if self.nbytes(self._at_most(wanted, middle)) <= budget:
                low = middle
            else:
                high = middle - 1
        return self._at_most(wanted, low)

    def least_bytes(self, tokens: int) -> int:
        """The fewest bytes of pages for `tokens`, with those of a draft model."""
        beside = self._draft.cache_bytes(tokens) if self._draft else 0
        return self.nbytes(self.pages(tokens, 0)) + beside

    def held(self, tokens: int) -> int:
        return min(-(-tokens // self._page_tokens) * self._page_tokens, self.most_tokens)

    def nbytes(self, pages: Sequence[int]) -> int:
        return cache_bytes(self._layout, pages, self._type)

    def wanted(self, tokens: int) -> tuple[int, ...]:
        pages = -(-tokens // self._page_tokens)
        return tuple(
            self._states if fixed else min(all_slots, -(-whole * pages // self._context_pages))
            for all_slots, whole, fixed in zip(
                self._all, self._whole, self._by_sequence, strict=True
            )
        )

    def _at_most(self, wanted: Sequence[int], limit: int) -> tuple[int, ...]:
        """`wanted`, cut to `limit` pages, but not below the bound of one sequence, in groups with a
        window or with states."""
        return tuple(
            min(pages, max(one, limit)) if one < whole or fixed else pages
            for pages, one, whole, fixed in zip(
                wanted, self._one, self._whole, self._by_sequence, strict=True
            )
        )


def _checkpoints(layout: CacheLayout, options: MemoryOptions, room: int) -> int:
    """Number of checkpoints of recurrent states; by default a few per slot, within a small part of
    the cache's `room` in bytes."""
    nbytes = state_bytes(layout, options.kv_dtype)
    if not nbytes:
        return 0
    budget = options.state_checkpoint_bytes
    if budget is None:
        budget = min(max(0, room) // 8, CHECKPOINTS_PER_SLOT * options.limits.slots * nbytes)
    return budget // nbytes


def state_bytes(layout: CacheLayout, type: CacheType) -> int:
    """Bytes of the recurrent states of one sequence."""
    groups = (number for number, kind in enumerate(layout.kinds) if kind.by_sequence)
    return sum(page_bytes(layout, number, type) for number in groups)


def _refusal(plan: MemoryPlan, device: torch.device, usable: int, options: MemoryOptions) -> str:
    set_aside = options.set_aside_bytes if options.memory_bytes is None else 0
    needed = plan.available_bytes - plan.headroom_bytes
    requests = (
        f" beside {set_aside:,} for images of requests and evicted pages (lower "
        "`image_memory_bytes`, `max_image_pixels` and `host_cache_bytes`)"
        if set_aside
        else ""
    )
    draft = f"{plan.draft_bytes:,} for the draft model, " if plan.draft_bytes else ""
    return (
        f"The model needs {needed:,} bytes on {device}: {plan.weight_bytes:,} for weights, "
        f"{plan.activation_bytes:,} for activations, {plan.vision_bytes:,} for images, "
        f"{plan.sampler_bytes:,} for sampling, {draft}"
        f"{plan.cache_bytes:,} for a cache of {plan.cache_tokens:,} tokens. It may use {usable:,} "
        f"of the {plan.available_bytes:,} bytes available{requests}."
    )


def _advice(weight_bytes: int, usable: int, without: int) -> str:
    """`without`: the usable bytes if nothing were set aside."""
    if weight_bytes <= usable:
        return (
            "Lower `context_tokens`, `cache_tokens`, `max_sequences` or `step_tokens`, or free "
            "memory."
        )
    if weight_bytes <= without:
        return "Lower these settings, or free memory."
    return (
        "The weights alone exceed that: choose a smaller quantisation, divide the model "
        "(`parallel.tensor`, on GPUs also `num_gpu`), or give it more memory."
    )


def _check_one_context(cache_tokens: int, context_tokens: int) -> None:
    if cache_tokens < context_tokens:
        raise DoesNotFitError(
            f"`cache_tokens` is {cache_tokens:,}, less than one context of {context_tokens:,} "
            "tokens. Raise it, or lower `context_tokens`."
        )


def sampler_bytes(model: ModelSizes, layout: CacheLayout, limits: StepLimits) -> int:
    """Bytes of sampling and of a step's inputs.

    The state of the slots and of one for padding, the largest workspace, sums of pooled states,
    results and their packed copy, page tables, the inputs, and the masks of all rows while they are
    computed and in two buffers, of which a CUDA device has only one."""
    slots, context_tokens = limits.slots, limits.context_tokens
    vocab_size, padded = model.vocab_size, limits.slots + 1
    state = Sampler.state_bytes(slots=padded, context_tokens=context_tokens, vocab_size=vocab_size)
    workspace = Sampler.workspace_bytes(
        rows=limits.draws, context_tokens=context_tokens, vocab_size=vocab_size
    )
    tables = padded * sum(layout.capacity_pages(context_tokens))
    sums = Pooler.state_bytes(slots=slots, hidden=model.hidden_size)
    results = 2 * result_bytes(limits, hidden=model.hidden_size)
    masks = mask_bytes(rows=limits.draws, vocab_size=vocab_size)
    inputs = buffer_bytes(layout, limits, vocab_size)
    return state + workspace + sums + results + inputs + 3 * masks + 4 * tables


def _measured(device: torch.device, weight_bytes: int) -> int:
    """Free bytes, with those of the weights. On CUDA the weights are already allocated; on a CPU
    they are file pages, which count as free."""
    free = available_bytes(device)
    return free + weight_bytes if device.type == "cuda" else free
