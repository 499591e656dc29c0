"""What a model needs at worst, and whether it fits; decided once, at start."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from runtime.errors import DoesNotFitError
from runtime.kv.pool import page_bytes
from runtime.kv.spec import CacheLayout
from runtime.worker.input_preparer import buffer_words
from runtime.worker.sampler import Sampler

LEFT_FREE = 0.1  # of what is available: what others allocate, and what allocators waste


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and the pages of each cache group.

    `vision_bytes`: what encoding images takes beside weights, and their features.
    `available_bytes` is all that the engine may use, the weights among it; `headroom_bytes` is
    what stays free of it. `cache_tokens`: positions the cache holds in all. `others_bytes`: what
    other processes reserve for the same model.
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

    @property
    def reserved_bytes(self) -> int:
        return self.available_bytes - self.headroom_bytes

    def with_pages(
        self, pages: Sequence[int], layout: CacheLayout, dtype: torch.dtype, *, cache_tokens: int
    ) -> "MemoryPlan":
        """The same with fewer pages, for `cache_tokens`."""
        sizes = [page_bytes(layout, group, dtype) for group in range(len(layout.groups))]
        cache = sum(count * size for count, size in zip(pages, sizes, strict=True))
        return replace(
            self,
            cache_bytes=cache,
            headroom_bytes=self.headroom_bytes + self.cache_bytes - cache,
            pages=tuple(pages),
            cache_tokens=cache_tokens,
        )


@dataclass(frozen=True, slots=True)
class VisionBytes:
    """What images take on the device: the encoder's weights, and at worst everything else."""

    weights: int = 0
    workspace: int = 0


_BLIND = VisionBytes()


class Footprint(Protocol):
    """What a plan looks at of a model; see `DecoderModel`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def weight_bytes(self) -> int: ...

    def activation_bytes(self, tokens: int, outputs: int) -> int: ...


def plan_memory(
    model: Footprint,
    layout: CacheLayout,
    *,
    device: torch.device,
    kv_dtype: torch.dtype,
    slots: int,
    step_tokens: int,
    context_tokens: int,
    cache_tokens: int | None,
    memory_bytes: int | None,
    depth: int = 2,
    vision: VisionBytes = _BLIND,
    sharers: int = 1,
    set_aside_bytes: int = 0,
) -> MemoryPlan:
    """Divide the memory; with `cache_tokens` None the cache takes as much as is useful and free.

    `depth`: steps in flight; until one retires, its sequences keep what earlier rows saw. Raises
    DoesNotFitError when the cache cannot hold one full context beside the rest. A given
    `memory_bytes` is used to the last byte; of measured memory `set_aside_bytes` are not the
    engine's, a tenth is left free, and `sharers`, the ranks that allocate from the same memory,
    have equal parts of it.
    """
    weights = model.weight_bytes + vision.weights
    activations = model.activation_bytes(step_tokens, slots)
    sampler = _sampler_bytes(model, layout, slots, step_tokens, context_tokens)
    if memory_bytes is not None:
        available, usable, set_aside_bytes = memory_bytes, memory_bytes, 0
    else:
        available, usable = _shared(_measured(device, weights) - set_aside_bytes, sharers)
    room = usable - weights - activations - vision.workspace - sampler
    cache = _CacheSizes(layout, kv_dtype, slots, context_tokens, in_flight=depth * step_tokens)
    tokens = cache.tokens_within(room) if cache_tokens is None else cache_tokens
    _check_one_context(tokens, context_tokens)
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
    )
    if plan.cache_bytes > room:
        raise DoesNotFitError(_refusal(plan, device, usable, set_aside_bytes))
    return plan


def available_bytes(device: torch.device) -> int:
    """What may still be allocated: on a CPU within the machine and its control groups."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + kept
    return min((_machine_bytes(), *_control_group_bytes()))


class _CacheSizes:
    """How many pages a cache of so many tokens has in each group, and what they take.

    What a sequence holds of a group with a window is bounded, so these groups stop growing once
    every slot has its bound; steps in flight are shared by all slots. Of a group with a state for
    each sequence, every slot gets one however short the sequences are.
    """

    def __init__(
        self,
        layout: CacheLayout,
        dtype: torch.dtype,
        slots: int,
        context_tokens: int,
        *,
        in_flight: int,
    ) -> None:
        self._page_tokens = layout.page_tokens
        self._slots = slots
        self._page_bytes = [page_bytes(layout, g, dtype) for g in range(len(layout.groups))]
        self._context_pages = -(-context_tokens // layout.page_tokens)
        self._whole = layout.capacity_pages(context_tokens)
        self._one = layout.held_pages(context_tokens, in_flight)
        # Each slot's rows in flight may touch a page that is only begun.
        resting = (pages + 1 for pages in layout.held_pages(context_tokens, 0))
        flying = -(-in_flight // layout.page_tokens)
        self._all = tuple(
            min(slots * one, slots * rest + flying)
            for one, rest in zip(self._one, resting, strict=True)
        )
        self._by_sequence = tuple(kind.by_sequence for kind in layout.kinds)

    @property
    def most_tokens(self) -> int:
        """Every slot with a full context: more than that is never used at once."""
        return self._slots * self._context_pages * self._page_tokens

    def tokens_within(self, budget: int) -> int:
        """The most tokens whose pages fit, but one full context at least."""
        low, high = self._context_pages, self._slots * self._context_pages
        while low < high:
            middle = (low + high + 1) // 2
            if self.nbytes(self._wanted(middle * self._page_tokens)) <= budget:
                low = middle
            else:
                high = middle - 1
        return low * self._page_tokens

    def pages(self, tokens: int, budget: int) -> tuple[int, ...]:
        """What `tokens` need; groups with a window or with states give way, down to one sequence's
        bound."""
        wanted = self._wanted(tokens)
        low, high = 0, max(wanted)
        while low < high:
            middle = high - (high - low) // 2
            if self.nbytes(self._at_most(wanted, middle)) <= budget:
                low = middle
            else:
                high = middle - 1
        return self._at_most(wanted, low)

    def held(self, tokens: int) -> int:
        return min(-(-tokens // self._page_tokens) * self._page_tokens, self.most_tokens)

    def nbytes(self, pages: Sequence[int]) -> int:
        return sum(count * size for count, size in zip(pages, self._page_bytes, strict=True))

    def _wanted(self, tokens: int) -> tuple[int, ...]:
        pages = -(-tokens // self._page_tokens)
        return tuple(
            all_slots if fixed else min(all_slots, -(-whole * pages // self._context_pages))
            for all_slots, whole, fixed in zip(
                self._all, self._whole, self._by_sequence, strict=True
            )
        )

    def _at_most(self, wanted: Sequence[int], limit: int) -> tuple[int, ...]:
        """Groups with a window or with states cut to `limit` pages, if one sequence still fits."""
        return tuple(
            min(pages, max(one, limit)) if one < whole or fixed else pages
            for pages, one, whole, fixed in zip(
                wanted, self._one, self._whole, self._by_sequence, strict=True
            )
        )


def _refusal(plan: MemoryPlan, device: torch.device, usable: int, set_aside: int) -> str:
    needed = plan.available_bytes - plan.headroom_bytes
    requests = (
        f" beside {set_aside:,} for images of requests (lower `image_memory_bytes` and "
        "`max_image_pixels`)"
        if set_aside
        else ""
    )
    return (
        f"The model needs {needed:,} bytes on {device}: {plan.weight_bytes:,} for weights, "
        f"{plan.activation_bytes:,} for activations, {plan.vision_bytes:,} for images, "
        f"{plan.sampler_bytes:,} for sampling, "
        f"{plan.cache_bytes:,} for a cache of {plan.cache_tokens:,} tokens. It may use {usable:,} "
        f"of the {plan.available_bytes:,} bytes available{requests}. Lower `context_tokens`, "
        "`cache_tokens`, `max_sequences` or `step_tokens`, or free memory."
    )


def _check_one_context(cache_tokens: int, context_tokens: int) -> None:
    if cache_tokens < context_tokens:
        raise DoesNotFitError(
            f"`cache_tokens` is {cache_tokens:,}, less than one context of {context_tokens:,} "
            "tokens. Raise it, or lower `context_tokens`."
        )


def _sampler_bytes(
    model: Footprint, layout: CacheLayout, slots: int, step_tokens: int, context_tokens: int
) -> int:
    """Slot state, worst-case workspace, vectors, page tables, and the staging buffers (two on the
    host)."""
    words = buffer_words(
        layout, slots=slots, step_tokens=step_tokens, context_tokens=context_tokens
    )
    state = Sampler.state_bytes(slots=slots, context_tokens=context_tokens)
    workspace = Sampler.workspace_bytes(
        slots=slots, context_tokens=context_tokens, vocab_size=model.vocab_size
    )
    tables = slots * sum(layout.capacity_pages(context_tokens))
    vectors = 2 * 4 * slots * model.hidden_size
    return state + workspace + vectors + 2 * 4 * words + 4 * tables


def _shared(free_bytes: int, sharers: int) -> tuple[int, int]:
    """What one of them has, and what of it is used."""
    each = max(0, free_bytes) // sharers
    return each, int(each * (1 - LEFT_FREE))


def _measured(device: torch.device, weight_bytes: int) -> int:
    """On CUDA the weights are there already; on a CPU they are file pages, which count as free."""
    free = available_bytes(device)
    return free + weight_bytes if device.type == "cuda" else free


def _machine_bytes() -> int:
    fields = _numbers(Path("/proc/meminfo"))
    if "MemAvailable:" in fields:
        return fields["MemAvailable:"] * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _control_group_bytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """What each limit above this process leaves, with file cache counted as free."""
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file", "active_file")
            yield from _limits_above(root, path, *names)
        elif "memory" in controllers.split(","):
            names = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
                "total_active_file",
            )
            yield from _limits_above(root / "memory", path, *names)


def _limits_above(
    root: Path, path: str, limit: str, usage: str, *reclaimable: str
) -> Iterator[int]:
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            break
        text = _text(folder / limit)
        if text is None or not text.isdigit():  # absent here, or "max"
            continue
        statistics = _numbers(folder / "memory.stat")
        used = int(_text(folder / usage) or 0) - sum(statistics.get(n, 0) for n in reclaimable)
        yield max(0, int(text) - used)


def _text(path: Path) -> str | None:
    return path.read_text().strip() if path.is_file() else None


def _numbers(path: Path) -> dict[str, int]:
    """Lines of "name number ..."."""
    pairs = (line.split() for line in (_text(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}
