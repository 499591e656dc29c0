"""The parts of layers that are computed in float32 even if the model computes in 16 bits."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers import delta_net, kimi_delta
from model_zoo.layers.altup import AltUp
from model_zoo.layers.delta_net import GatedDeltaNet
from model_zoo.layers.experts import ExpertOptions, Experts, ExpertSizes
from model_zoo.layers.kimi_delta import KimiDelta
from model_zoo.layers.state_sizes import StateSizes
from runtime.kernels.delta import DeltaGates
from tests.gguf_files import write_tensors

HIDDEN, ROWS = 64, 5
Arrays = Mapping[str, np.ndarray]


@pytest.fixture
def scope(tmp_path) -> Callable[[Arrays], TensorScope]:
    """A function from float32 tensors to a scope that computes in bfloat16."""

    def write(arrays: Arrays) -> TensorScope:
        path = write_tensors(tmp_path / "layer.gguf", arrays)
        return TensorScope(GGUFFile.open(path), device=torch.device("cpu"), dtype=torch.bfloat16)

    return write


def rows(seed: int = 1) -> Tensor:
    """bfloat16 [rows, hidden]."""
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(ROWS, HIDDEN, generator=generator)).bfloat16()


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def product(x: Tensor, weight: np.ndarray) -> Tensor:
    return x.double() @ torch.from_numpy(weight).double().T


def assert_exact(got: Tensor, expected: Tensor) -> None:
    """A number that was rounded to bfloat16 on the way is off by up to 1 part in 256."""
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_experts_are_chosen_by_logits_in_float32(scope) -> None:
    router, seen = random(4, HIDDEN), []

    def routing(logits: Tensor, used: int) -> tuple[Tensor, Tensor]:
        seen.append(logits)
        return torch.zeros(ROWS, used, dtype=torch.int64), torch.ones(ROWS, used)

    matrices = {f"ffn_{name}_exps.weight": random(4, HIDDEN, HIDDEN) for name in ("gate", "up")}
    matrices |= {"ffn_down_exps.weight": random(4, HIDDEN, HIDDEN), "ffn_gate_inp.weight": router}
    sizes = ExpertSizes(4, 2, HIDDEN)
    Experts(scope(matrices), HIDDEN, sizes, ExpertOptions(routing=routing))(rows())
    assert_exact(seen[0], product(rows(), router))


@pytest.mark.parametrize("together", [False, True])
def test_decays_of_recurrent_states_come_from_gates_in_float32(
    scope, monkeypatch, together: bool
) -> None:
    sizes = StateSizes(heads=4, key_heads=4, key_dim=8, value_dim=8, width=4)
    alpha, beta = random(4, HIDDEN, seed=2), random(4, HIDDEN, seed=3)
    arrays = {
        "attn_qkv.weight": random(sizes.channels, HIDDEN),
        "attn_gate.weight": random(sizes.values, HIDDEN),
        "ssm_conv1d.weight": random(sizes.channels, sizes.width),
        "ssm_norm.weight": random(sizes.value_dim),
        "ssm_out.weight": random(HIDDEN, sizes.values),
        "ssm_a": -(random(4) ** 2),
        "ssm_dt.bias": random(4),
    }
    apart = {"ssm_alpha.weight": alpha, "ssm_beta.weight": beta}
    joined = {"ssm_ba.weight": np.stack([beta, alpha], axis=1).reshape(8, HIDDEN)}
    net = GatedDeltaNet(
        scope(arrays | (joined if together else apart)),
        hidden=HIDDEN,
        sizes=sizes,
        eps=1e-6,
        tiled=False,
    )
    seen: list[DeltaGates] = []

    def note(mixed: Tensor, gates: DeltaGates, *_: Any, **options: Any) -> Tensor:
        seen.append(gates)
        return mixed.new_zeros(ROWS, sizes.heads, sizes.value_dim)

    monkeypatch.setattr(delta_net, "gated_delta", note)
    monkeypatch.setattr(delta_net, "short_convolution", lambda mixed, *_: mixed)
    step: Any = SimpleNamespace(pages=None, plan=None, kept=lambda x: x)
    net(rows(), step)
    assert_exact(seen[0].alphas, product(rows(), alpha))
    assert_exact(seen[0].betas, product(rows(), beta))


def test_decays_of_kimi_delta_come_from_gates_in_float32(scope, monkeypatch) -> None:
    sizes = StateSizes(heads=4, key_heads=4, key_dim=8, value_dim=8, width=4)
    into, out_of = random(8, HIDDEN, seed=2), random(sizes.keys, 8, seed=3)
    square, beta = (sizes.values, HIDDEN), random(4, HIDDEN, seed=4)
    arrays = {
        **{f"attn_{name}.weight": random(*square) for name in "qkv"},
        **{f"ssm_conv1d_{name}.weight": random(sizes.keys, sizes.width) for name in "qkv"},
        "ssm_f_a.weight": into,
        "ssm_f_b.weight": out_of,
        "ssm_g_a.weight": random(8, HIDDEN),
        "ssm_g_b.weight": random(sizes.values, 8),
        "ssm_beta.weight": beta,
        "ssm_norm.weight": random(sizes.value_dim),
        "attn_output.weight": random(HIDDEN, sizes.values),
        "ssm_a": -(random(4) ** 2),
        "ssm_dt.bias": random(sizes.keys),
    }
    delta = KimiDelta(scope(arrays), hidden=HIDDEN, sizes=sizes, eps=1e-6)
    seen: list[DeltaGates] = []

    def note(mixed: Tensor, gates: DeltaGates, *_: Any, **options: Any) -> Tensor:
        seen.append(gates)
        return mixed.new_zeros(ROWS, sizes.heads, sizes.value_dim)

    monkeypatch.setattr(kimi_delta, "gated_delta", note)
    monkeypatch.setattr(kimi_delta, "short_convolution", lambda mixed, *_: mixed)
    step: Any = SimpleNamespace(pages=None, plan=None, kept=lambda x: x)
    delta(rows(), step)
    expected = product(product(rows(), into), out_of)
    torch.testing.assert_close(seen[0].alphas.double(), expected, rtol=1e-4, atol=1e-4)
    assert_exact(seen[0].betas, product(rows(), beta))


def test_coefficients_of_streams_are_computed_in_float32(scope) -> None:
    """Large coefficients of the correction magnify what the router's result was rounded by."""
    streams, correct = 2, np.array([[300.0, -300.0], [200.0, -200.0]], dtype=np.float32)
    row = random(1, HIDDEN) / HIDDEN
    router = np.concatenate([row, row * 0.999])
    arrays = {
        "altup_router_norm.weight": np.full(HIDDEN, HIDDEN, dtype=np.float32),
        "altup_router.weight": router,
        "altup_predict_coef.weight": random(streams**2, streams),
        "altup_correct_coef.weight": correct,
    }
    sizes: Any = SimpleNamespace(hidden=HIDDEN, eps=1e-6)
    altup = AltUp(scope(arrays), sizes, streams=streams, active=0)
    computed = rows()
    got = altup.corrected(torch.zeros(ROWS, streams, HIDDEN).bfloat16(), computed)
    normal = computed.double()
    normal = normal * torch.rsqrt(normal.square().mean(-1, keepdim=True) + 1e-6)
    shares = 1 + product(product(normal, router).tanh(), correct)
    expected = shares[:, :, None] * computed.double()[:, None]
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected, rtol=0.01, atol=1e-5)
