"""The gated delta rule and its convolution, against `transformers` and each other."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    causal_conv1d_fn,
    torch_recurrent_gated_delta_rule,
)

from runtime.kernels.delta import (
    DeltaGates,
    gated_delta,
    gated_delta_twin,
    short_convolution,
    short_convolution_twin,
)
from runtime.kernels.native import library
from runtime.kernels.pointwise import silu
from runtime.worker.model import AttentionPlan, LayerPages, RowSpan

# Key heads, heads, key_dim, value_dim.
SHAPES = {
    "one_head": (1, 1, 16, 16),
    "groups": (2, 6, 32, 16),
    "wide_values": (2, 2, 24, 200),
    "odd_sizes": (3, 6, 20, 37),
    "real": (2, 4, 128, 128),
}
TAPS, PAGES = 3, 7
KERNELS = {
    "fast": (short_convolution, gated_delta),
    "twin": (lambda *a: silu(short_convolution_twin(*a)), gated_delta_twin),
}
every_shape = pytest.mark.parametrize("shape", SHAPES)
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


class Sequences:
    """Random inputs of some sequences, each with a page; the pages start with garbage."""

    def __init__(
        self,
        shape: str,
        lengths: list[int],
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.device = device
        self.key_heads, self.heads, self.key_dim, self.value_dim = SHAPES[shape]
        self.channels = 2 * self.key_heads * self.key_dim + self.heads * self.value_dim
        draw = torch.Generator().manual_seed(5)

        def noise(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=draw)

        self.mixed = [noise(n, self.channels).to(dtype) for n in lengths]
        self.alphas, self.betas = ([noise(n, self.heads) * 3 for n in lengths] for _ in range(2))
        self.rates, self.offsets = -noise(self.heads).exp(), noise(self.heads)
        self.weight = noise(TAPS + 1, self.channels)
        self.pages = torch.randperm(PAGES, generator=draw)[: len(lengths)]
        self.stored = LayerPages(
            torch.full((PAGES, TAPS, self.channels), torch.inf, device=device),
            torch.full((PAGES, self.heads, self.key_dim, self.value_dim), torch.inf, device=device),
            0,
        )
        self.done = [0] * len(lengths)

    def step(self, counts: dict[int, int], kernel: str, *, tiled: bool = False) -> dict:
        """The next rows of some sequences -> the results of convolution and rule for each."""
        spans, slots = [], []
        for number, count in counts.items():
            begin = len(slots)
            slots += [number] * count
            spans.append(RowSpan(begin, begin + count, number, self.done[number]))
        cells = self.pages[torch.tensor(slots)].to(self.device)
        row_slot = torch.tensor(slots, dtype=torch.int32)
        ends = torch.tensor([min(self.done[slot], 1) for slot in slots], dtype=torch.int32)
        seen = (t.to(self.device) for t in (row_slot, torch.zeros_like(ends), ends))
        plan = AttentionPlan(torch.empty(0), *seen, cells, tuple(spans))
        parts = [[t[s.slot][s.start : s.start + s.end - s.begin] for s in spans]
                 for t in (self.mixed, self.alphas, self.betas)]  # fmt: skip
        mixed, alphas, betas = (torch.cat(part).to(self.device) for part in parts)
        gates = DeltaGates(alphas, betas, self.rates.to(self.device), self.offsets.to(self.device))
        convolve, learn = KERNELS[kernel]
        convolved = convolve(mixed, self.weight.to(self.device), self.stored, plan).cpu()
        learnt = learn(mixed, gates, self.stored, plan, key_heads=self.key_heads, tiled=tiled)
        learnt = learnt.cpu()
        for number, count in counts.items():
            self.done[number] += count
        return {s.slot: (convolved[s.begin : s.end], learnt[s.begin : s.end]) for s in spans}

    def expected(self, number: int, *, tiled: bool = False) -> tuple[Tensor, Tensor]:
        """All rows of a sequence at once, as transformers computes them."""
        mixed, keys = self.mixed[number].float(), self.key_heads * self.key_dim
        convolved = causal_conv1d_fn(mixed.t()[None], self.weight.t(), None, activation="silu")
        queries, key, value = mixed.split((keys, keys, self.heads * self.value_dim), dim=1)
        q, k = (t.unflatten(1, (self.key_heads, -1))[None] for t in (queries, key))
        group = self.heads // self.key_heads  # older versions of transformers do not repeat keys
        if tiled:
            q, k = (t.repeat(1, 1, group, 1) for t in (q, k))
        else:
            q, k = (t.repeat_interleave(group, dim=2) for t in (q, k))
        v = value.unflatten(1, (self.heads, -1))[None]
        decay = torch.nn.functional.softplus(self.alphas[number] + self.offsets) * self.rates
        learnt, _ = torch_recurrent_gated_delta_rule(
            q, k, v, decay[None], self.betas[number].sigmoid()[None], use_qk_l2norm_in_kernel=True
        )
        return convolved[0].t(), learnt[0]


def check_sums(convolve: Callable[..., Tensor], patch: pytest.MonkeyPatch) -> None:
    """A convolution whose results are sums, in steps of two sequences."""
    patch.setitem(KERNELS, "sums", (convolve, gated_delta))
    sequences = Sequences("groups", [9, 3])
    steps = [sequences.step(counts, "sums") for counts in ({0: 4}, {1: 3, 0: 1}, {0: 4})]
    inputs, factors = sequences.mixed[0].t()[None], sequences.weight.t()
    expected = causal_conv1d_fn(inputs, factors, None, activation=None)[0].t()
    assert_close(torch.cat([step[0][0] for step in steps]), expected)


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    half = {"rtol": 2e-2, "atol": 2e-3}  # what is computed once more is rounded once more
    tolerance = {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else half
    torch.testing.assert_close(got, expected.to(dtype), **tolerance)


@every_shape
@every_kernel
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_steps_of_any_length_give_the_result_of_the_whole_sequence(
    shape, kernel, tiled, device
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    sequences = Sequences(shape, [150, 9, 3], device=device)
    cuts = [{0: 70}, {1: 1, 0: 1, 2: 3}, {0: 64, 1: 7}, {1: 1, 0: 1}, {0: 14}]
    rows: dict[int, list] = {0: [], 1: [], 2: []}
    for counts in cuts:
        for number, part in sequences.step(counts, kernel, tiled=tiled).items():
            rows[number].append(part)
    for number, parts in rows.items():
        got = [torch.cat(part) for part in zip(*parts, strict=True)]
        for one, other in zip(got, sequences.expected(number, tiled=tiled), strict=True):
            assert_close(one, other)


@every_shape
def test_bits_do_not_depend_on_steps_or_other_sequences(shape) -> None:
    if library() is None:
        pytest.skip("no C compiler here, so there is no fast path to test")
    together, apart = Sequences(shape, [41, 23]), Sequences(shape, [41, 23])
    whole = together.step({0: 41, 1: 23}, "fast")
    parts = [apart.step({1: 5}, "fast"), apart.step({1: 1}, "fast"), apart.step({1: 17}, "fast")]
    for number, one in enumerate(whole[1]):
        assert torch.equal(one, torch.cat([part[1][number] for part in parts]))
    apart.step({0: 41}, "fast")
    used = together.pages
    for one, other in ((together.stored.keys, apart.stored.keys),
                       (together.stored.values, apart.stored.values)):  # fmt: skip
        assert torch.equal(one[used], other[used])


@every_kernel
def test_a_new_sequence_ignores_the_state_in_its_page_and_changes_no_other_page(
    kernel,
) -> None:
    sequences = Sequences("groups", [5, 7])
    got = sequences.step({1: 7}, kernel)[1]
    for one, other in zip(got, sequences.expected(1), strict=True):
        assert_close(one, other)
    untouched = [page for page in range(PAGES) if page != sequences.pages[1]]
    for stored in (sequences.stored.keys, sequences.stored.values):
        assert stored[untouched].isinf().all() and stored[sequences.pages[1]].isfinite().all()


@every_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_states_stay_in_float32_under_other_types(kernel, dtype) -> None:
    sequences = Sequences("groups", [40], dtype)
    parts = [sequences.step({0: count}, kernel)[0] for count in (30, 10)]
    got = [torch.cat(part) for part in zip(*parts, strict=True)]
    for one, other in zip(got, sequences.expected(0), strict=True):
        assert one.dtype == dtype
        assert_close(one, other, dtype)


@pytest.mark.parametrize(
    "convolve", [partial(short_convolution, curved=False), short_convolution_twin]
)
def test_results_of_a_convolution_may_be_sums(convolve, monkeypatch) -> None:
    check_sums(convolve, monkeypatch)


@every_kernel
def test_extreme_gates_stay_finite(kernel) -> None:
    sequences = Sequences("groups", [100])
    sequences.alphas[0][::3], sequences.betas[0][::2] = 80.0, -90.0
    sequences.alphas[0][1::3], sequences.betas[0][1::2] = -90.0, 90.0
    _, learnt = sequences.step({0: 100}, kernel)[0]
    assert_close(learnt, sequences.expected(0)[1])
