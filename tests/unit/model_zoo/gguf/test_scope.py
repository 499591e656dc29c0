"""TensorScope: layers by name, and errors for every tensor that does not fit."""

import os
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import ScopeOptions, TensorScope
from model_zoo.gguf.tensors import META
from runtime.distributed.ranks import Split
from runtime.errors import ModelFileError
from runtime.quant.weight import Compute
from tests.gguf_files import write_tensors
from tests.mapped_files import maps_of

CPU = torch.device("cpu")
RANDOM = np.random.default_rng(0)
MATRIX = RANDOM.standard_normal((16, 32), dtype=np.float32)
OTHER = RANDOM.standard_normal((3, 32), dtype=np.float32)
BIAS = RANDOM.standard_normal(16, dtype=np.float32)
X = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def open_scope(tmp_path):
    """A function that writes named arrays, or (array, type), and opens a scope over the file."""

    def make(device=CPU, dtype=torch.float32, progress=None, **tensors) -> TensorScope:
        path = write(tmp_path / "scope.gguf", tensors)
        options = ScopeOptions(progress=progress)
        return TensorScope(GGUFFile.open(path), device=device, dtype=dtype, options=options)

    return make


def write(path: Path, tensors: dict) -> Path:
    dotted = {name.replace("__", "."): array for name, array in tensors.items()}
    return write_tensors(
        path, {n if n.endswith("bias") else f"{n}.weight": array for n, array in dotted.items()}
    )


def near(x: torch.Tensor, y: np.ndarray, tolerance: float = 1e-5) -> bool:
    return torch.allclose(x.float(), torch.from_numpy(y), atol=tolerance)


def test_a_linear_multiplies_and_adds_its_bias(open_scope) -> None:
    w = open_scope(blk__0__up=MATRIX, blk__0__up__bias=BIAS).scope("blk", 0)
    linear = w.linear("up", shape=(16, 32))
    assert near(linear(X), X.numpy() @ MATRIX.T + BIAS)
    w.check()


def test_weights_keep_the_block_type_and_the_pages_of_the_file(open_scope) -> None:
    w = open_scope(up=(MATRIX, "Q8_0"))
    one, again = w.linear("up", shape=(16, 32)), w.linear("up", shape=(16, 32))
    assert one.weight.type.name == "Q8_0" and one.weight.nbytes == 16 * 34
    assert one.weight.data.data_ptr() == again.weight.data.data_ptr()
    assert w.loaded_bytes == 16 * 34
    rounded = gguf.quants.dequantize(
        gguf.quants.quantize(MATRIX, gguf.GGMLQuantizationType.Q8_0),
        gguf.GGMLQuantizationType.Q8_0,
    )
    assert near(one(X), X.numpy() @ rounded.T)


def test_all_weights_are_multiplied_as_the_scope_says(tmp_path) -> None:
    """One tensor, rows of several that are adjacent, and experts of several tensors."""
    experts = {f"blk__0__ffn_gate__{i}": (MATRIX, "Q8_0") for i in range(2)}
    path = write(tmp_path / "s.gguf", {"q": (MATRIX, "Q8_0"), "k": (OTHER, "Q8_0"), **experts})
    w = TensorScope(
        GGUFFile.open(path),
        device=CPU,
        dtype=torch.float32,
        options=ScopeOptions(compute=Compute.FAST, deterministic=True),
    )
    fused = w.fused_linear({"q": (16, 32), "k": (3, 32)})
    stacked = w.scope("blk", 0).experts("ffn_gate_exps", shape=(2, 16, 32))
    single = w.linear("q", shape=(16, 32)).weight
    for weight in (single, *(part.weight for part in fused.parts), stacked):
        for found in (weight, weight.outputs(0, 2)):
            assert found.compute is Compute.FAST and found.deterministic
    assert w.transposed(stacked).deterministic
    assert not TensorScope(w._tensors.file, device=CPU, dtype=torch.float32).deterministic


def test_weights_are_stored_in_planes_for_devices_with_kernels(open_scope, monkeypatch) -> None:
    """Parts, joined rows and experts of several tensors, which are copied as on a device."""
    experts = {f"blk__0__ffn_gate__{i}": (MATRIX, "Q5_0") for i in range(2)}
    tensors = {"q": (MATRIX, "Q5_0"), "between": BIAS, "k": (OTHER, "Q5_0"), **experts}
    layers = {"q": (16, 32), "k": (3, 32)}

    def built(w: TensorScope) -> tuple:
        return w.fused_linear(layers), w.scope("blk", 0).experts("ffn_gate_exps", shape=(2, 16, 32))

    expected = built(open_scope(**tensors))
    monkeypatch.setattr("model_zoo.gguf.tensors.has_kernels", lambda device: True)
    w = open_scope(**tensors)
    fused, stacked = built(w)
    for weight in (stacked, *(part.weight for part in fused.parts)):
        assert weight.type.name == "Q5_0 in planes"
    assert torch.equal(stacked.dequantize(), expected[1].dequantize())
    for one, other in zip(fused(X), expected[0](X), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert w.loaded_bytes == (16 + 3 + 2 * 16) * 32  # rows of 22 bytes are padded


def test_an_alternative_name_replaces_a_missing_tensor(open_scope) -> None:
    tied = open_scope(token_embd=MATRIX)
    embedding = tied.embedding("token_embd", shape=(None, 32))
    head = tied.linear("output", alt="token_embd", shape=(16, 32))
    assert head.weight is embedding.weight
    assert near(embedding(torch.tensor([4, 1])), MATRIX[[4, 1]])
    assert tied.loaded_bytes == MATRIX.nbytes
    apart = open_scope(token_embd=MATRIX, output=2 * MATRIX)
    head = apart.linear("output", alt="token_embd", shape=(16, 32))
    assert near(head(X), X.numpy() @ MATRIX.T * 2)
    assert apart.unclaimed() == ("token_embd.weight",)


def test_optional_layers_may_be_absent_but_not_misshapen(open_scope) -> None:
    w = open_scope(norm=BIAS, up=MATRIX)
    assert w.rms_norm("other_norm", 1e-5, size=16, optional=True) is None
    assert w.linear("other", shape=(16, 32), optional=True) is None
    assert w.vector("factors", size=16, optional=True) is None
    assert w.rms_norm("norm", 1e-5, size=16, optional=True) is not None
    assert w.linear("up", shape=(16, 32), optional=True) is not None
    w.check()
    assert w.vector("norm", size=7, optional=True) is not None
    with pytest.raises(ModelFileError, match=r"norm\.weight is 16, not 7"):
        w.check()


def test_a_vector_may_have_leading_dimensions_of_one(open_scope) -> None:
    w = open_scope(row=BIAS[None], deep=BIAS[None, None], rows=BIAS.reshape(2, 8), flat=BIAS)
    second = Split(((0, 4), (4, 16)), 1)
    for name in ("row", "deep"):
        assert near(w.vector(name, size=16), BIAS)
        part = w.table(f"{name}.weight", shape=(16,), optional=True, outs=second)
        assert part is not None and near(part, BIAS[4:])
    w.vector("rows", size=16)
    with pytest.raises(ModelFileError, match=r"1 is .*\(rows\.weight is 2 x 8, not 16\)"):
        w.check()


def test_leading_dimensions_of_one_may_be_left_out(open_scope) -> None:
    """As ggml writes, and so llama-quantize."""
    row = RANDOM.standard_normal(32, dtype=np.float32)
    matrix = RANDOM.standard_normal((16, 32), dtype=np.float32)
    w = open_scope(row=row, up=matrix, exps=matrix, ffn_gate__0=row, ffn_gate__1=2 * row)
    whole = Split(((0, 1),), 0)
    assert near(w.linear("row", shape=(1, 32))(X), X.numpy() @ row[:, None], 1e-4)
    assert near(w.embedding("row", shape=(None, 32))(torch.tensor([0])), row[None])
    assert near(w.table("row.weight", shape=(1, 32)), row[None])
    assert near(w.weight("row", shape=(1, 32), outs=whole).dequantize(), row[None])
    fused = w.fused_linear({"row": (1, 32), "up": (16, 32)})
    assert near(fused(X)[0], X.numpy() @ row[:, None], 1e-4)
    second = Split(((0, 8), (8, 16)), 1)
    assert w.experts("exps", shape=(1, 16, 32)).shape == (1, 16, 32)
    assert near(w.weight("exps", shape=(1, 16, 32), outs=second).dequantize(), matrix[None, 8:])
    stacked = w.experts("ffn_gate_exps", shape=(2, 1, 32))
    assert near(stacked.dequantize(), np.stack([row, 2 * row])[:, None])
    w.check()
    w.linear("row", shape=(2, 32))
    with pytest.raises(ModelFileError, match=r"row\.weight is 32, not 2 x 32"):
        w.check()


def test_a_norm_may_have_another_name(open_scope) -> None:
    w = open_scope(other=BIAS)
    assert near(w.rms_norm("norm", 1e-5, size=16, alt="other").weight, BIAS)
    w.check()
    w.rms_norm("neither", 1e-5, size=16, alt="nor")
    with pytest.raises(ModelFileError, match=r"1 is missing \(neither\.weight\)"):
        w.check()


def test_an_optional_tensor_that_another_layer_has_is_required(open_scope) -> None:
    tensors = {f"blk__{n}__{name}": MATRIX for n in range(3) for name in ("up", "down")}
    w = open_scope(blk__1__up__bias=BIAS, blk__2__factors=BIAS, factors=BIAS, **tensors)
    for block in range(3):
        inner = w.scope("blk", block)
        inner.linear("up", shape=(16, 32))
        inner.linear("down", shape=(16, 32))
        inner.vector("factors", size=16, optional=True)
    w.vector("factors", size=16)
    missing = "blk.0.up.bias, blk.0.factors.weight, blk.1.factors.weight, blk.2.up.bias"
    with pytest.raises(ModelFileError, match=re.escape(f"4 are missing ({missing})")):
        w.check()


def test_biases_may_be_required_for_present_tensors(open_scope) -> None:
    w = open_scope(a=MATRIX, b=OTHER, b__bias=OTHER[:, 0])
    w.linear("a", shape=(16, 32))
    w.linear("b", shape=(3, 32))
    w.need_biases("b", "elsewhere")
    w.check()
    w.need_biases("a", "b")
    with pytest.raises(ModelFileError, match=r"1 is missing \(a\.bias\)"):
        w.check()


def test_a_layer_norm_has_the_bias_of_the_file_or_none(open_scope) -> None:
    x = X[:, :16]
    weight, bias = torch.from_numpy(BIAS), torch.from_numpy(BIAS[::-1].copy())
    with_bias = open_scope(norm=BIAS, norm__bias=bias.numpy())
    expected = torch.nn.functional.layer_norm(x, (16,), weight, bias, 1e-5)
    assert near(with_bias.layer_norm("norm", 1e-5, size=16)(x), expected.numpy())
    with_bias.check()
    expected = torch.nn.functional.layer_norm(x, (16,), weight, None, 1e-5)
    assert near(open_scope(norm=BIAS).layer_norm("norm", 1e-5, size=16)(x), expected.numpy())


def test_a_bare_vector_may_lack_the_suffix(open_scope) -> None:
    assert near(open_scope(sinks=BIAS).vector("sinks", size=16, bare=True), BIAS)
    w = open_scope(sinks__bias=BIAS)  # stored without the suffix
    assert near(w.vector("sinks.bias", size=16, bare=True), BIAS)
    assert w.vector("sinks", size=16, bare=True, optional=True) is None
    w.check()


def test_inner_scopes_have_the_context_length(open_scope, tmp_path) -> None:
    path = write(tmp_path / "served.gguf", {"norm": BIAS})
    w = TensorScope(
        GGUFFile.open(path),
        device=CPU,
        dtype=torch.float32,
        options=ScopeOptions(context_tokens=77),
    )
    assert w.scope("blk", 0).context_tokens == 77
    assert open_scope(norm=BIAS).context_tokens is None


def test_norms_are_float32_and_biases_have_the_type_of_activations(open_scope) -> None:
    w = open_scope(dtype=torch.bfloat16, norm=(BIAS, "F16"), up=MATRIX, up__bias=BIAS)
    norm, linear = w.rms_norm("norm", 1e-6, size=16), w.linear("up", shape=(16, 32))
    assert norm.weight.dtype == torch.float32
    assert linear.bias is not None and linear.bias.dtype == torch.bfloat16
    x = X[:, :16]
    expected = torch.nn.functional.rms_norm(x, (16,), torch.from_numpy(BIAS), 1e-6)
    assert near(norm(x), expected.numpy(), 1e-3)
    assert linear(X.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("types", [("F32", "F32"), ("F32", "F16"), ("Q8_0", "Q8_0")])
@pytest.mark.parametrize("between", [False, True], ids=["adjacent", "apart"])
@pytest.mark.parametrize("biases", [(), ("a",), ("a", "b")], ids=str)
def test_fused_linears_equal_single_ones(open_scope, types, between, biases) -> None:
    tensors = {"a": (MATRIX, types[0])}
    tensors |= {"between": BIAS} if between else {}
    tensors |= {"b": (OTHER, types[1])}
    tensors |= {f"{name}__bias": BIAS[: len(tensors[name][0])] for name in biases}
    w = open_scope(**tensors)
    shapes = {"a": (16, 32), "b": (3, 32)}
    fused = w.fused_linear(shapes)
    assert len(fused.parts) == (1 if len(set(types)) == 1 and not between else 2)
    singles = [w.linear(name, shape=shape)(X) for name, shape in shapes.items()]
    for fused_part, single in zip(fused(X), singles, strict=True):
        assert torch.allclose(fused_part, single, atol=1e-5)
    assert w.unclaimed() == (("between.weight",) if between else ())


def test_fused_linears_are_joined_on_other_devices(open_scope) -> None:
    w = open_scope(device=META, a=MATRIX, between=BIAS, b=OTHER)
    fused = w.fused_linear({"a": (16, 32), "b": (3, 32)})
    assert [part.weight.shape for part in fused.parts] == [(19, 32)]
    assert fused.parts[0].weight.data.device == META
    assert w.unclaimed() == ("between.weight",)


def test_neighbours_of_one_type_are_joined_on_other_devices(open_scope) -> None:
    w = open_scope(device=META, a=MATRIX, between=BIAS, b=OTHER, c=(MATRIX, "F16"), d=OTHER)
    fused = w.fused_linear({"a": (16, 32), "b": (3, 32), "c": (16, 32), "d": (3, 32)})
    assert fused.sizes == ((16, 3), (16,), (3,)) and fused.width == 38
    assert [part.weight.shape[0] for part in fused.parts] == [19, 16, 3]


def test_one_tensor_may_have_the_rows_of_all_matrices(open_scope) -> None:
    w = open_scope(ab=np.concatenate([MATRIX, OTHER]))
    first, second = w.fused_linear({"a": (16, 32), "b": (3, 32)}, whole="ab")(X)
    assert near(first, X.numpy() @ MATRIX.T) and near(second, X.numpy() @ OTHER.T)
    w.check()


@pytest.mark.parametrize("device", [CPU, META], ids=str)
def test_all_problems_are_reported_at_once(open_scope, device) -> None:
    tensors = {"blk__0__up": MATRIX, "blk__0__down": OTHER, "blk__1__up": OTHER}
    tensors |= {"blk__0__down__bias": BIAS, "norm": BIAS, "left": BIAS, "right": BIAS}
    w = open_scope(device=device, **tensors)
    for block in range(2):
        inner = w.scope("blk", block)
        inner.linear("up", shape=(16, 32))
        inner.linear("down", shape=(3, 32))
        inner.fused_linear({"gate": (16, 32), "up": (16, 32)})
    w.rms_norm("norm", 1e-5, size=5)
    w.embedding("token_embd", shape=(None, 32))
    with pytest.raises(ModelFileError) as caught:
        w.check()
    message = str(caught.value)
    for words in [
        "scope.gguf",
        "5 are missing (blk.0.gate.weight, blk.1.down.weight, blk.1.gate.weight",
        "token_embd.weight",
        "blk.1.down.bias",
        "3 are of the wrong shape",
        "blk.0.down.bias is 16, not 3",
        "blk.1.up.weight is 3 x 32, not 16 x 32",
        "norm.weight is 16, not 5",
        "2 are not known to this architecture (left.weight, right.weight)",
    ]:
        assert words in message, message


def test_ignored_tensors_may_stay_unused(open_scope) -> None:
    w = open_scope(blk__0__up=MATRIX, blk__0__old=BIAS)
    w.scope("blk", 0).linear("up", shape=(16, 32))
    assert w.unclaimed() == ("blk.0.old.weight",)
    w.scope("blk", 0).ignore("old", "never_there")
    w.check()


def test_progress_rises_to_the_whole_and_counts_shared_tensors_once(open_scope) -> None:
    heard = []
    w = open_scope(
        progress=lambda *now: heard.append(now), token_embd=MATRIX, norm=BIAS, a=MATRIX, b=OTHER
    )
    w.embedding("token_embd", shape=(None, 32))
    w.linear("output", alt="token_embd", shape=(16, 32))
    w.rms_norm("norm", 1e-5, size=16)
    w.fused_linear({"a": (16, 32), "b": (3, 32)})
    total = 2 * MATRIX.nbytes + BIAS.nbytes + OTHER.nbytes
    assert [of for _, of in heard] == [total] * 4
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
    assert heard[-1] == (total, total)


def test_only_the_rows_of_an_embedding_that_are_read_are_in_memory(open_scope, tmp_path) -> None:
    rows = RANDOM.standard_normal((65_536, 32), dtype=np.float32)
    heard = []
    w = open_scope(progress=lambda done, of: heard.append(done / of), a=rows, b=rows)
    embedding = w.embedding("a", shape=(65_536, 32))
    resident = resident_bytes(tmp_path / "scope.gguf")
    assert heard[-1] == 0.5 and resident < rows.nbytes // 4
    assert near(embedding(torch.tensor([0, 65_535])), rows[[0, 65_535]])
    w.linear("b", shape=(65_536, 32))
    assert heard[-1] == 1
    assert rows.nbytes <= resident_bytes(tmp_path / "scope.gguf") < rows.nbytes * 5 // 4


def resident_bytes(path: Path) -> int:
    """The bytes of a mapped file that are in this process's memory."""
    return sum(counted["Rss"] for _, counted in maps_of(os.getpid(), path))


def test_building_on_meta_reads_nothing(open_scope, monkeypatch) -> None:
    def fetch(*_, **__):
        raise AssertionError("a survey reads no data")

    monkeypatch.setattr(GGUFFile, "fetch", fetch)
    w = open_scope(device=META, a=(MATRIX, "Q8_0"), a__bias=BIAS, norm=BIAS)
    assert w.linear("a", shape=(16, 32)).weight.data.device == META
    assert w.rms_norm("norm", 1e-5, size=16).weight.device == META
    w.check()
