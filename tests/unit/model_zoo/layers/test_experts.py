"""Layers of experts: routing rules and the layouts of files, against plain torch."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import TensorScope
from model_zoo.gguf.tensors import META
from model_zoo.layers.experts import ExpertOptions, Experts, ExpertSizes
from model_zoo.layers.feed_forward import GatedFeedForward
from model_zoo.layers.routing import (
    SIGMOID_OF_CHOSEN,
    SOFTMAX_OF_ALL,
    SOFTMAX_OF_CHOSEN,
    stated_softmax,
)
from runtime.errors import ModelFileError
from runtime.kernels import experts as kernels
from runtime.kernels.experts import clamped_swiglu
from runtime.kernels.pointwise import gelu_mul
from runtime.kernels.routing import Routing, Scores
from tests.gguf_files import write_tensors
from tests.memory_profile import peak_bytes, recorded_memory

CPU = torch.device("cpu")
HIDDEN, WIDTH, COUNT, USED = 64, 96, 6, 2
SIZES = ExpertSizes(COUNT, USED, WIDTH)
RENORMALISED = Routing(Scores.SIGMOID, renormalised=True, scale=2.5)
ROUTINGS = (SOFTMAX_OF_ALL, SOFTMAX_OF_CHOSEN, SIGMOID_OF_CHOSEN, RENORMALISED)


def random(*shape: int, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return values * shape[-1] ** -0.5


GATE, UP = random(COUNT, WIDTH, HIDDEN, seed=1), random(COUNT, WIDTH, HIDDEN, seed=2)
DOWN, ROUTER = random(COUNT, HIDDEN, WIDTH, seed=3), random(COUNT, HIDDEN, seed=4) * 3
SPLIT = {
    "ffn_gate_inp.weight": ROUTER,
    "ffn_gate_exps.weight": GATE,
    "ffn_up_exps.weight": UP,
    "ffn_down_exps.weight": DOWN,
}
X = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(5))


def write(path: Path, tensors: Mapping[str, np.ndarray], type: str = "F32") -> Path:
    plain = {name for name, array in tensors.items() if array.ndim == 1 or "inp" in name}
    return write_tensors(
        path, {name: (tensors[name], "F32" if name in plain else type) for name in tensors}
    )


def scope(path: Path, *, device: torch.device = CPU, dtype=torch.float32) -> TensorScope:
    return TensorScope(GGUFFile.open(path), device=device, dtype=dtype)


def layer(path: Path, tensors: Mapping[str, np.ndarray], sizes=SIZES, **options) -> Experts:
    w = scope(write(path, tensors))
    experts = Experts(w, HIDDEN, sizes, ExpertOptions(**options))
    w.check()
    return experts


def dense(x: Tensor, chosen: Tensor, weights: Tensor, *, gated=None, weigh_input=False) -> Tensor:
    """Every expert for every row, in plain torch, of which the chosen are taken."""
    gated = gated or (lambda gate, up: F.silu(gate) * up)
    gate, up, down = (torch.from_numpy(array) for array in (GATE, UP, DOWN))
    rows = []
    for row, experts, factors in zip(x, chosen.tolist(), weights, strict=True):
        total = torch.zeros(HIDDEN)
        for expert, factor in zip(experts, factors, strict=True):
            seen = row * factor if weigh_input else row
            out = down[expert] @ gated(gate[expert] @ seen, up[expert] @ seen)
            total += out if weigh_input else out * factor
        rows.append(total)
    return torch.stack(rows)


def routed(routing=SOFTMAX_OF_CHOSEN, used: int = USED) -> tuple[Tensor, Tensor]:
    return routing(X @ torch.from_numpy(ROUTER).T, used)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("used", [1, 2, COUNT])
def test_a_layer_is_the_weighted_sum_of_the_chosen_experts(tmp_path, routing, used) -> None:
    experts = layer(tmp_path / "a.gguf", SPLIT, ExpertSizes(COUNT, used, None), routing=routing)
    torch.testing.assert_close(experts(X), dense(X, *routed(routing, used)), rtol=1e-4, atol=1e-5)


def test_weights_may_multiply_the_inputs_of_experts(tmp_path) -> None:
    experts = layer(tmp_path / "a.gguf", SPLIT, routing=SIGMOID_OF_CHOSEN, weigh_input=True)
    expected = dense(X, *routed(SIGMOID_OF_CHOSEN), weigh_input=True)
    torch.testing.assert_close(experts(X), expected, rtol=1e-4, atol=1e-5)
    assert (experts(X) - dense(X, *routed(SIGMOID_OF_CHOSEN))).abs().max() > 1e-2


def test_a_shared_expert_sees_every_row_and_is_added(tmp_path) -> None:
    shared = {
        f"ffn_{name}_shexp.weight": array[0]
        for name, array in (("gate", GATE), ("up", UP), ("down", DOWN))
    }
    w = scope(write(tmp_path / "a.gguf", SPLIT | shared))
    other = GatedFeedForward(w, hidden=HIDDEN, size=WIDTH, suffix="_shexp")
    experts = Experts(w, HIDDEN, SIZES, ExpertOptions(shared=other))
    w.check()
    expected = dense(X, *routed()) + other(X)
    torch.testing.assert_close(experts(X), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("alternating", [False, True])
def test_gates_and_ups_in_one_tensor_are_those_of_two(tmp_path, alternating: bool) -> None:
    biases = {
        "ffn_gate_exps.bias": random(COUNT, WIDTH, seed=6),
        "ffn_up_exps.bias": random(COUNT, WIDTH, seed=7),
        "ffn_down_exps.bias": random(COUNT, HIDDEN, seed=8),
    }
    if alternating:
        rows = np.stack([GATE, UP], axis=2).reshape(COUNT, 2 * WIDTH, HIDDEN)
        bias = np.stack([biases["ffn_gate_exps.bias"], biases["ffn_up_exps.bias"]], axis=2)
    else:
        rows = np.concatenate([GATE, UP], axis=1)
        bias = np.concatenate([biases["ffn_gate_exps.bias"], biases["ffn_up_exps.bias"]], axis=1)
    whole = {
        "ffn_gate_inp.weight": ROUTER,
        "ffn_gate_up_exps.weight": rows,
        "ffn_gate_up_exps.bias": bias.reshape(COUNT, 2 * WIDTH),
        "ffn_down_exps.weight": DOWN,
        "ffn_down_exps.bias": biases["ffn_down_exps.bias"],
    }
    one = layer(tmp_path / "one.gguf", whole, alternating=alternating)
    two = layer(tmp_path / "two.gguf", SPLIT | biases)
    assert torch.equal(one(X), two(X))
    assert not torch.equal(two(X), layer(tmp_path / "none.gguf", SPLIT)(X))


@pytest.mark.parametrize("order", ["by expert", "by kind", "shuffled"])
def test_a_tensor_for_each_expert_is_the_same_as_one_for_all(tmp_path, order: str) -> None:
    matrices = [
        (f"ffn_{kind}.{expert}.weight", array[expert])
        for expert in range(COUNT)
        for kind, array in (("gate", GATE), ("up", UP), ("down", DOWN))
    ]
    if order == "by kind":
        matrices.sort(key=lambda pair: pair[0].split(".")[0])
    if order == "shuffled":
        matrices = [matrices[i] for i in np.random.default_rng(0).permutation(len(matrices))]
    old = layer(tmp_path / "old.gguf", {"ffn_gate_inp.weight": ROUTER, **dict(matrices)})
    assert torch.equal(old(X), layer(tmp_path / "new.gguf", SPLIT)(X))


def test_separate_tensors_at_equal_distances_stay_in_the_mapped_file(tmp_path) -> None:
    matrices = {f"ffn_up.{e}.weight": UP[e] for e in range(COUNT)}
    others = {f"ffn_down.{e}.weight": DOWN[e] for e in range(COUNT)}
    pairs = zip(matrices.items(), others.items(), strict=True)
    mixed = {name: array for pair in pairs for name, array in pair}
    uneven = dict([*matrices.items()][::-1])
    for number, (tensors, inside) in enumerate(((matrices, 1), (mixed, 1), (uneven, 0))):
        file = GGUFFile.open(write(tmp_path / f"{number}.gguf", tensors))
        w = TensorScope(file, device=CPU, dtype=torch.float32)
        weight = w.experts("ffn_up_exps", shape=(COUNT, WIDTH, HIDDEN))
        name = next(iter(tensors))
        begin = file.weight(name).data.data_ptr() - file.tensors[name].begin
        assert (begin <= weight.data.data_ptr() < begin + file.size_bytes) == bool(inside)
        assert np.array_equal(weight.dequantize().numpy(), UP)


@pytest.mark.parametrize("weigh_input", [False, True])
def test_a_scale_of_each_expert_multiplies_its_output(tmp_path, weigh_input) -> None:
    scale = np.linspace(0.5, 2, COUNT, dtype=np.float32)
    tensors = SPLIT | {"ffn_down_exps.scale": scale}
    experts = layer(tmp_path / "a.gguf", tensors, weigh_input=weigh_input)
    scaled = SPLIT | {"ffn_down_exps.weight": DOWN * scale[:, None, None]}
    expected = layer(tmp_path / "b.gguf", scaled, weigh_input=weigh_input)(X)
    torch.testing.assert_close(experts(X), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "gated, plain",
    [
        (gelu_mul, lambda gate, up: F.gelu(gate, approximate="tanh") * up),
        (
            partial(clamped_swiglu, limit=0.5, slope=1.702),
            lambda gate, up: (
                (gate.clamp(max=0.5) * torch.sigmoid(1.702 * gate.clamp(max=0.5)))
                * (up.clamp(-0.5, 0.5) + 1)
            ),
        ),
    ],
)
def test_other_gates_may_be_used(tmp_path, gated, plain) -> None:
    experts = layer(tmp_path / "a.gguf", SPLIT, gated=gated)
    torch.testing.assert_close(experts(X), dense(X, *routed(), gated=plain), rtol=1e-4, atol=1e-5)


def test_a_router_may_have_a_bias(tmp_path) -> None:
    bias = np.array([0, 90, 0, 0, 90, 0], np.float32)
    experts = layer(tmp_path / "a.gguf", SPLIT | {"ffn_gate_inp.bias": bias})
    logits = X @ torch.from_numpy(ROUTER).T + torch.from_numpy(bias)
    chosen, weights = SOFTMAX_OF_CHOSEN(logits, USED)
    assert set(chosen.flatten().tolist()) == {1, 4}
    torch.testing.assert_close(experts(X), dense(X, chosen, weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("type", ["F32", "Q8_0"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(tmp_path, routing, type) -> None:
    w = scope(write(tmp_path / "a.gguf", SPLIT, type))
    experts = Experts(w, HIDDEN, SIZES, ExpertOptions(routing=routing))
    alone = torch.cat([experts(row) for row in X.split(1)])
    for rows in (2, 3, 7, 8, 17, 30):
        assert torch.equal(experts(X[-rows:]), alone[-rows:])


def test_no_rows_give_no_rows(tmp_path) -> None:
    assert layer(tmp_path / "a.gguf", SPLIT)(X[:0]).shape == (0, HIDDEN)


def test_missing_and_misshapen_tensors_are_named(tmp_path) -> None:
    wrong = {**SPLIT, "ffn_up_exps.weight": UP[:, :-1], "ffn_down_exps.bias": random(5, 64, seed=1)}
    del wrong["ffn_gate_inp.weight"]
    w = scope(write(tmp_path / "a.gguf", wrong), device=META)
    Experts(w, HIDDEN, ExpertSizes(COUNT, USED, None))
    with pytest.raises(ModelFileError) as error:
        w.check()
    for part in ("ffn_gate_inp.weight", "ffn_up_exps.weight is 6 x 95 x 64", "ffn_down_exps.bias"):
        assert part in str(error.value)


def test_an_odd_number_of_rows_cannot_be_gates_and_ups(tmp_path) -> None:
    odd = {"ffn_gate_inp.weight": ROUTER, "ffn_down_exps.weight": DOWN}
    odd["ffn_gate_up_exps.weight"] = random(COUNT, 2 * WIDTH + 1, HIDDEN, seed=1)
    w = scope(write(tmp_path / "a.gguf", odd), device=META)
    Experts(w, HIDDEN, ExpertSizes(COUNT, USED, None))
    with pytest.raises(ModelFileError, match="6 x 193 x 64"):
        w.check()


def test_old_tensors_of_several_types_are_refused(tmp_path) -> None:
    mixed = {f"ffn_up.{n}.weight": (UP[n], type) for n, type in enumerate(("F32", "Q8_0"))}
    w = scope(write_tensors(tmp_path / "a.gguf", mixed), device=META)
    w.experts("ffn_up_exps", shape=(2, WIDTH, HIDDEN))
    with pytest.raises(ModelFileError, match=r"ffn_up\.0\.weight and its counterparts differ"):
        w.check()


@pytest.mark.parametrize(
    "keys, complaint",
    [
        ({"expert_used_count": 2}, "expert_count"),
        ({"expert_count": 8}, "expert_used_count"),
        ({"expert_count": 8, "expert_used_count": 9}, "8 is the limit"),
        ({"expert_count": 1 << 31, "expert_used_count": 1}, "4,096 is the limit"),
        ({"expert_count": 0, "expert_used_count": 1}, "1 or more"),
    ],
)
def test_invalid_counts_are_refused(keys: dict[str, int], complaint: str) -> None:
    values = {f"x.{key}": value for key, value in keys.items()}
    metadata = Metadata({"general.architecture": "x", **values}, path=Path("m.gguf"))
    with pytest.raises(ModelFileError, match=complaint):
        ExpertSizes.read(metadata)


@pytest.mark.parametrize(
    "keys, routing",
    [
        ({}, SOFTMAX_OF_CHOSEN),
        ({"expert_weights_norm": False}, SOFTMAX_OF_ALL),
        ({"norm_top_k_prob": False}, SOFTMAX_OF_ALL),
        ({"expert_weights_norm": False, "norm_top_k_prob": True}, SOFTMAX_OF_CHOSEN),
        ({"expert_weights_norm": True, "norm_top_k_prob": False}, SOFTMAX_OF_ALL),
    ],
)
def test_two_keys_state_whether_weights_are_renormalised(keys: dict, routing: Routing) -> None:
    values = {f"x.{key}": value for key, value in keys.items()}
    metadata = Metadata({"general.architecture": "x", **values}, path=Path("m.gguf"))
    assert stated_softmax(metadata) == routing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 30, 700])
@pytest.mark.parametrize("weigh_input", [False, True])
@pytest.mark.parametrize("twin", [False, True])
def test_a_layer_allocates_no_more_than_it_declares(
    tmp_path, dtype, rows, weigh_input, twin, monkeypatch
) -> None:
    if twin:
        monkeypatch.setattr(kernels, "library", lambda: None)
    shared = {
        f"ffn_{n}_shexp.weight": a[0] for n, a in (("gate", GATE), ("up", UP), ("down", DOWN))
    }
    w = scope(write(tmp_path / "a.gguf", SPLIT | shared), dtype=dtype)
    shared = GatedFeedForward(w, hidden=HIDDEN, size=WIDTH, suffix="_shexp")
    options = ExpertOptions(weigh_input=weigh_input, shared=shared)
    experts = Experts(w, HIDDEN, SIZES, options)
    x = torch.randn(rows, HIDDEN).to(dtype)
    experts(x)
    with recorded_memory() as recorded:
        experts(x)
    slab = 16 * experts.matrix_elements if twin else 0
    assert 0 < peak_bytes(recorded) <= 4 * rows * experts.row_elements + slab


def test_experts_without_a_width_are_refused(tmp_path) -> None:
    empty = {"ffn_gate_exps": (0, HIDDEN), "ffn_up_exps": (0, HIDDEN), "ffn_down_exps": (HIDDEN, 0)}
    nothing = {f"{n}.weight": np.empty((COUNT, *s), np.float32) for n, s in empty.items()}
    path = write_tensors(tmp_path / "a.gguf", {"ffn_gate_inp.weight": ROUTER, **nothing})
    w = scope(path, device=META)
    Experts(w, HIDDEN, ExpertSizes(COUNT, USED, None))
    with pytest.raises(ModelFileError, match=r"ffn_gate_exps\.weight is 6 x 0 x 64"):
        w.check()
