"""State spaces, with convolutions that have a bias, against `transformers` and each other."""

import pytest
import torch
from torch import Tensor
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    causal_conv1d_fn,
    mamba2_selective_state_update,
)

from runtime.kernels.delta import short_convolution, short_convolution_twin
from runtime.kernels.native import library
from runtime.kernels.pointwise import silu
from runtime.kernels.state_space import StateSpace, state_space, state_space_twin
from runtime.worker.model import AttentionPlan, LayerPages, RowSpan

# Groups, heads, key_dim, value_dim.
SHAPES = {
    "one_head": (1, 1, 16, 16),
    "groups": (2, 6, 32, 16),
    "wide_values": (2, 2, 24, 200),
    "odd_sizes": (3, 6, 20, 37),
    "real": (1, 4, 128, 64),
}
TAPS, PAGES = 3, 7
KERNELS = {
    "fast": (short_convolution, state_space),
    "twin": (lambda *a, **k: silu(short_convolution_twin(*a, **k)), state_space_twin),
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
        self.groups, self.heads, self.key_dim, self.value_dim = SHAPES[shape]
        self.channels = self.heads * self.value_dim + 2 * self.groups * self.key_dim
        draw = torch.Generator().manual_seed(5)

        def noise(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=draw)

        self.mixed = [noise(n, self.channels).to(dtype) for n in lengths]
        self.steps = [noise(n, self.heads) * 3 for n in lengths]
        self.space = StateSpace(-noise(self.heads).exp(), noise(self.heads), noise(self.heads))
        self.weight, self.bias = noise(TAPS + 1, self.channels), noise(self.channels)
        self.pages = torch.randperm(PAGES, generator=draw)[: len(lengths)]
        self.stored = LayerPages(
            torch.full((PAGES, TAPS, self.channels), torch.inf, device=device),
            torch.full((PAGES, self.heads, self.key_dim, self.value_dim), torch.inf, device=device),
            0,
        )
        self.done = [0] * len(lengths)

    def step(self, counts: dict[int, int], kernel: str) -> dict:
        """The next rows of some sequences -> the results of convolution and space for each."""
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
                 for t in (self.mixed, self.steps)]  # fmt: skip
        mixed, steps = (torch.cat(part).to(self.device) for part in parts)
        weight, bias, *space = (
            t.to(self.device)
            for t in (
                self.weight, self.bias, self.space.rates, self.space.offsets, self.space.skips
            )
        )  # fmt: skip
        convolve, learn = KERNELS[kernel]
        convolved = convolve(mixed, weight, self.stored, plan, bias=bias).cpu()
        parameters = StateSpace(*space)
        learnt = learn(mixed, steps, parameters, self.stored, plan, groups=self.groups).cpu()
        for number, count in counts.items():
            self.done[number] += count
        return {s.slot: (convolved[s.begin : s.end], learnt[s.begin : s.end]) for s in spans}

    def expected(self, number: int) -> tuple[Tensor, Tensor]:
        """All rows of a sequence, as transformers computes them one by one."""
        mixed, (heads, width) = self.mixed[number].float(), (self.heads, self.value_dim)
        convolved = causal_conv1d_fn(mixed.t()[None], self.weight.t(), self.bias, activation="silu")
        keys = self.groups * self.key_dim
        values, key, query = mixed.split((heads * width, keys, keys), dim=1)
        state, rows = torch.zeros(1, heads, width, self.key_dim), []
        for row in range(len(mixed)):
            rows.append(
                mamba2_selective_state_update(
                    state,
                    values[row].view(1, heads, width),
                    self.steps[number][row][None, :, None].expand(-1, -1, width),
                    self.space.rates[:, None, None].expand(-1, width, self.key_dim),
                    key[row].view(1, self.groups, -1),
                    query[row].view(1, self.groups, -1),
                    self.space.skips[:, None].expand(-1, width),
                    dt_bias=self.space.offsets[:, None].expand(-1, width),
                    dt_softplus=True,
                )
            )
        return convolved[0].t(), torch.cat(rows)


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    half = {"rtol": 2e-2, "atol": 2e-2}  # what is computed once more is rounded once more
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else half
    torch.testing.assert_close(got, expected.to(dtype), **tolerance)


@every_shape
@every_kernel
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_steps_of_any_length_give_the_result_of_the_whole_sequence(shape, kernel, device) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    sequences = Sequences(shape, [150, 9, 3], device=device)
    cuts = [{0: 70}, {1: 1, 0: 1, 2: 3}, {0: 64, 1: 7}, {1: 1, 0: 1}, {0: 14}]
    rows: dict[int, list] = {0: [], 1: [], 2: []}
    for counts in cuts:
        for number, part in sequences.step(counts, kernel).items():
            rows[number].append(part)
    for number, parts in rows.items():
        got = [torch.cat(part) for part in zip(*parts, strict=True)]
        for one, other in zip(got, sequences.expected(number), strict=True):
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
def test_a_new_sequence_ignores_the_state_in_its_page_and_changes_no_other_page(kernel) -> None:
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


@every_kernel
def test_extreme_steps_stay_finite(kernel) -> None:
    sequences = Sequences("groups", [100])
    sequences.steps[0][::3], sequences.steps[0][1::3] = 80.0, -90.0
    _, learnt = sequences.step({0: 100}, kernel)[0]
    torch.testing.assert_close(learnt, sequences.expected(0)[1], rtol=1e-4, atol=1e-2)
