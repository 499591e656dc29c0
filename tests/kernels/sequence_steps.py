"""Random sequences in recurrent layers, in steps of some rows each, and what `transformers`
computes of them at once."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    causal_conv1d_fn,
    mamba2_selective_state_update,
)
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from runtime.kernels.delta import (
    DeltaGates,
    gated_delta,
    gated_delta_twin,
    short_convolution,
    short_convolution_twin,
)
from runtime.kernels.pointwise import silu
from runtime.kernels.selective_scan import (
    Channels,
    ScanRows,
    selective_scan,
    selective_scan_twin,
)
from runtime.kernels.state_space import StateSpace, state_space, state_space_twin
from runtime.kernels.wkv import WkvHeads, WkvRows, wkv7, wkv7_twin
from runtime.worker.model import AttentionPlan, LayerPages, RowSpan

TAPS, PAGES = 3, 7
Shape = tuple[int, int, int, int]  # groups of key heads, heads, key_dim, value_dim
SHAPES: Mapping[str, Shape] = {
    "one_head": (1, 1, 16, 16),
    "groups": (2, 6, 32, 16),
    "wide_values": (2, 2, 24, 200),
    "odd_sizes": (3, 6, 20, 37),
}
# A convolution and a rule.
Kernels = tuple[Callable[..., Tensor], Callable[..., Any]]


def curved_twin(*arguments: object, **options: object) -> Tensor:
    return silu(short_convolution_twin(*arguments, **options))


class Rule(Protocol):
    """How a layer updates and reads its states.

    columns: for each input [rows, heads] beside the convolved ones, whether it has a number for
    each element of a key instead. parameters: the same for vectors [heads], of which the first is
    negative. biased: whether the convolution before it has a bias. atol: the largest error in
    float32, and in types of 16 bits.
    """

    shapes: ClassVar[Mapping[str, Shape]]
    kernels: ClassVar[Mapping[str, Kernels]]
    biased: ClassVar[bool]
    atol: ClassVar[tuple[float, float]]

    @property
    def columns(self) -> tuple[bool, ...]: ...

    @property
    def parameters(self) -> tuple[bool, ...]: ...

    def call(
        self,
        kernel: Callable[..., Any],
        mixed: Tensor,
        columns: Sequence[Tensor],
        parameters: Sequence[Tensor],
        pages: LayerPages,
        plan: AttentionPlan,
        groups: int,
    ) -> Tensor:
        """The results of a step -> [rows, heads, value_dim]."""

    def expected(
        self, mixed: Tensor, columns: Sequence[Tensor], parameters: Sequence[Tensor], shape: Shape
    ) -> Tensor:
        """All rows of a sequence -> [rows, heads, value_dim]."""


@dataclass(frozen=True)
class GatedDelta:
    """The gated delta rule. tiled: whether value head h uses key head h % groups."""

    tiled: bool = False
    by_element: bool = False
    shapes: ClassVar[Mapping[str, Shape]] = {**SHAPES, "real": (2, 4, 128, 128)}
    kernels: ClassVar[Mapping[str, Kernels]] = {
        "fast": (short_convolution, gated_delta),
        "twin": (curved_twin, gated_delta_twin),
    }
    biased: ClassVar[bool] = False
    atol: ClassVar[tuple[float, float]] = (2e-5, 2e-3)

    @property
    def columns(self) -> tuple[bool, ...]:
        return self.by_element, False

    @property
    def parameters(self) -> tuple[bool, ...]:
        return False, self.by_element

    def call(self, kernel, mixed, columns, parameters, pages, plan, groups) -> Tensor:
        gates = DeltaGates(*columns, *parameters)
        return kernel(mixed, gates, pages, plan, key_heads=groups, tiled=self.tiled)

    def expected(self, mixed, columns, parameters, shape) -> Tensor:
        key_heads, heads, key_dim, value_dim = shape
        (alphas, betas), (rates, offsets) = columns, parameters
        keys, group = key_heads * key_dim, heads // key_heads
        queries, key, value = mixed.split((keys, keys, heads * value_dim), dim=1)
        q, k = (t.unflatten(1, (key_heads, -1))[None] for t in (queries, key))
        if self.tiled:  # older versions of transformers do not repeat keys
            q, k = (t.repeat(1, 1, group, 1) for t in (q, k))
        else:
            q, k = (t.repeat_interleave(group, dim=2) for t in (q, k))
        v = value.unflatten(1, (heads, -1))[None]
        decay = torch.nn.functional.softplus(alphas + offsets)
        strength, options = betas.sigmoid()[None], {"use_qk_l2norm_in_kernel": True}
        if self.by_element:
            decay = decay.unflatten(1, (heads, -1)) * rates[:, None]
            rule = recurrent_kimi_delta_attention
            return rule(q, k, v, decay[None], strength, None, False, **options)[0][0]
        rule = torch_recurrent_gated_delta_rule
        return rule(q, k, v, (decay * rates)[None], strength, **options)[0][0]


@dataclass(frozen=True)
class Mamba2:
    """State spaces, row by row."""

    shapes: ClassVar[Mapping[str, Shape]] = {**SHAPES, "real": (1, 4, 128, 64)}
    kernels: ClassVar[Mapping[str, Kernels]] = {
        "fast": (short_convolution, state_space),
        "twin": (curved_twin, state_space_twin),
    }
    columns: ClassVar[tuple[bool, ...]] = (False,)
    parameters: ClassVar[tuple[bool, ...]] = (False, False, False)
    biased: ClassVar[bool] = True
    atol: ClassVar[tuple[float, float]] = (1e-4, 2e-2)

    def call(self, kernel, mixed, columns, parameters, pages, plan, groups) -> Tensor:
        space = StateSpace(*parameters)
        return kernel(mixed, *columns, space, pages, plan, groups=groups)

    def expected(self, mixed, columns, parameters, shape) -> Tensor:
        groups, heads, key_dim, width = shape
        [steps], (rates, offsets, skips) = columns, parameters
        keys = groups * key_dim
        values, key, query = mixed.split((heads * width, keys, keys), dim=1)
        state, rows = torch.zeros(1, heads, width, key_dim), []
        for row in range(len(mixed)):
            rows.append(
                mamba2_selective_state_update(
                    state,
                    values[row].view(1, heads, width),
                    steps[row][None, :, None].expand(-1, -1, width),
                    rates[:, None, None].expand(-1, width, key_dim),
                    key[row].view(1, groups, -1),
                    query[row].view(1, groups, -1),
                    skips[:, None].expand(-1, width),
                    dt_bias=offsets[:, None].expand(-1, width),
                    dt_softplus=True,
                )
            )
        return torch.cat(rows)


@dataclass(frozen=True)
class Mamba:
    """Selective scans; each head is a channel."""

    shapes: ClassVar[Mapping[str, Shape]] = {
        "one_head": (1, 1, 16, 1),
        "groups": (1, 40, 32, 1),
        "odd_sizes": (1, 37, 11, 1),
    }
    kernels: ClassVar[Mapping[str, Kernels]] = {
        "fast": (short_convolution, selective_scan),
        "twin": (curved_twin, selective_scan_twin),
    }
    columns: ClassVar[tuple[bool, ...]] = (False,)
    parameters: ClassVar[tuple[bool, ...]] = (True, False, False)
    biased: ClassVar[bool] = True
    atol: ClassVar[tuple[float, float]] = (1e-4, 2e-2)

    def call(self, kernel, mixed, columns, parameters, pages, plan, groups) -> Tensor:
        _, count, size, _ = pages.values.shape
        values, keys, queries = mixed.split((count, size, size), dim=1)
        rates, *others = parameters
        channels = Channels(rates.view(count, size), *others)
        rows = ScanRows(values, *columns, keys, queries)
        return kernel(rows, channels, pages, plan).unsqueeze(2)

    def expected(self, mixed, columns, parameters, shape) -> Tensor:
        _, count, size, _ = shape
        [steps], (rates, offsets, skips) = columns, parameters
        values, key, query = (t.t()[None] for t in mixed.split((count, size, size), dim=1))
        of_channels, options = rates.view(count, size), {"delta_softplus": True}
        rows = mamba_selective_scan(
            values, steps.t()[None], of_channels, key, query, skips, None, offsets, **options
        )
        return rows[0].t().unsqueeze(2)


@dataclass(frozen=True)
class Wkv7:
    """The recurrence of RWKV 7, as in the authors' code, in float64; no head shares keys. Results
    are the answers of the states and the parts of the rows themselves, one after the other."""

    shapes: ClassVar[Mapping[str, Shape]] = {
        "one_head": (1, 1, 16, 16),
        "groups": (3, 3, 32, 32),
        "odd_sizes": (2, 2, 77, 77),
        "real": (2, 2, 64, 64),
    }
    kernels: ClassVar[Mapping[str, Kernels]] = {
        "fast": (short_convolution, wkv7),
        "twin": (curved_twin, wkv7_twin),
    }
    columns: ClassVar[tuple[bool, ...]] = (True, True)
    parameters: ClassVar[tuple[bool, ...]] = (True, True, True)
    biased: ClassVar[bool] = False
    atol: ClassVar[tuple[float, float]] = (1e-4, 2e-2)

    def call(self, kernel, mixed, columns, parameters, pages, plan, groups) -> Tensor:
        queries, keys, values = mixed.chunk(3, dim=1)
        rows = WkvRows(queries, columns[0], keys, values, columns[1])
        return torch.cat(kernel(rows, WkvHeads(*parameters), pages, plan), dim=2)

    def expected(self, mixed, columns, parameters, shape) -> Tensor:
        _, heads, _, size = shape
        r, k, v = (part.double().unflatten(1, (heads, size)) for part in mixed.chunk(3, dim=1))
        w, a = (column.double().sigmoid().unflatten(1, (heads, size)) for column in columns)
        k_k, k_a, r_k = (each.double().view(heads, size) for each in parameters)
        w, kk = (-math.exp(-0.5) * w).exp(), k * k_k
        kk = kk / kk.norm(dim=2, keepdim=True)
        k = k * (1 + (a - 1) * k_a)
        state, rows = torch.zeros(heads, size, size, dtype=torch.float64), []
        for n in range(len(mixed)):  # the state is [values, keys]
            removed = (state @ -kk[n, :, :, None]) @ (kk[n] * a[n])[:, None]
            state = state * w[n, :, None] + removed + v[n, :, :, None] @ k[n, :, None]
            own = (r[n] * k[n] * r_k).sum(dim=1, keepdim=True) * v[n]
            rows.append(torch.cat([(state @ r[n, :, :, None])[:, :, 0], own], dim=1))
        return torch.stack(rows).float()


RULES: Mapping[str, Rule] = {
    "delta": GatedDelta(),
    "tiled delta": GatedDelta(tiled=True),
    "delta of elements": GatedDelta(by_element=True),
    "state space": Mamba2(),
    "selective scan": Mamba(),
    "wkv7": Wkv7(),
}


class Sequences:
    """Random inputs of some sequences, each with a page; the pages start with garbage.

    mixed: of each sequence, [rows, channels]. columns: each of the rule's, of each sequence.
    """

    def __init__(
        self,
        rule: Rule,
        shape: str,
        lengths: list[int],
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.rule, self.shape, self.device = rule, rule.shapes[shape], device
        groups, heads, key_dim, value_dim = self.shape
        channels = 2 * groups * key_dim + heads * value_dim
        draw = torch.Generator().manual_seed(5)

        def noise(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=draw)

        self.mixed = [noise(n, channels).to(dtype) for n in lengths]
        width = {False: heads, True: heads * key_dim}
        self.columns = [[noise(n, width[each]) * 3 for n in lengths] for each in rule.columns]
        first, *others = (noise(width[each]) for each in rule.parameters)
        self.parameters = [-first.exp(), *others]
        self.weight = noise(TAPS + 1, channels)
        self.bias = noise(channels) if rule.biased else None
        self.pages = torch.randperm(PAGES, generator=draw)[: len(lengths)]
        self.stored = LayerPages(
            torch.full((PAGES, TAPS, channels), torch.inf, device=device),
            torch.full((PAGES, heads, key_dim, value_dim), torch.inf, device=device),
            0,
        )
        self.done = [0] * len(lengths)

    def step(self, counts: Mapping[int, int], kernels: Kernels) -> dict[int, tuple[Tensor, Tensor]]:
        """The next rows of some sequences -> the results of convolution and rule for each."""
        plan = self._plan(counts)
        mixed, *columns = (
            torch.cat([t[s.slot][s.start : s.start + s.end - s.begin] for s in plan.spans])
            for t in (self.mixed, *self.columns)
        )
        convolve, learn = kernels
        bias = None if self.bias is None else self.bias.to(self.device)
        mixed, weight = mixed.to(self.device), self.weight.to(self.device)
        convolved = convolve(mixed, weight, self.stored, plan, bias=bias).cpu()
        columns, parameters = (
            [t.to(self.device) for t in each] for each in (columns, self.parameters)
        )
        learnt = self.rule.call(
            learn, mixed, columns, parameters, self.stored, plan, self.shape[0]
        ).cpu()
        for number, count in counts.items():
            self.done[number] += count
        return {s.slot: (convolved[s.begin : s.end], learnt[s.begin : s.end]) for s in plan.spans}

    def steps(
        self, steps: Sequence[Mapping[int, int]], kernels: Kernels
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """The results of convolution and rule of all steps for each sequence."""
        parts: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for counts in steps:
            for number, part in self.step(counts, kernels).items():
                parts.setdefault(number, []).append(part)
        return {
            number: tuple(torch.cat(part) for part in zip(*found, strict=True))
            for number, found in parts.items()
        }

    def expected(self, number: int) -> tuple[Tensor, Tensor]:
        """All rows of a sequence at once, as transformers computes them."""
        mixed, columns = self.mixed[number].float(), [each[number] for each in self.columns]
        convolved = causal_conv1d_fn(mixed.t()[None], self.weight.t(), self.bias, activation="silu")
        learnt = self.rule.expected(mixed, columns, self.parameters, self.shape)
        return convolved[0].t(), learnt

    def assert_close(self, got: Tensor, expected: Tensor) -> None:
        """What is computed once more in a type of 16 bits is rounded once more."""
        (wide, narrow), dtype = self.rule.atol, self.mixed[0].dtype
        single = dtype == torch.float32
        tolerance = {"rtol": 1e-4, "atol": wide} if single else {"rtol": 2e-2, "atol": narrow}
        torch.testing.assert_close(got, expected.to(dtype), **tolerance)

    def _plan(self, counts: Mapping[int, int]) -> AttentionPlan:
        spans, slots = [], []
        for number, count in counts.items():
            begin = len(slots)
            slots += [number] * count
            spans.append(RowSpan(begin, begin + count, number, self.done[number]))
        cells = self.pages[torch.tensor(slots)].to(self.device)
        row_slot = torch.tensor(slots, dtype=torch.int32)
        ends = torch.tensor([min(self.done[slot], 1) for slot in slots], dtype=torch.int32)
        seen = (t.to(self.device) for t in (row_slot, torch.zeros_like(ends), ends))
        return AttentionPlan(torch.empty(0), *seen, cells, tuple(spans))
