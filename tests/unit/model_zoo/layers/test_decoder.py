"""The decoder around its layers: their inputs, and the use of their results."""

import numpy as np
import pytest
import torch
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import TensorScope
from model_zoo.layers.decoder import Decoder, DecoderOptions, TextLayer
from model_zoo.layers.rope import Pairs, Rotary
from model_zoo.layers.rope_scaling import plain_frequencies
from model_zoo.layers.step import Step
from model_zoo.layers.text_sizes import TextSizes
from runtime.engine.request import ImageSpan
from runtime.errors import ModelFileError
from runtime.kv.cache_kinds import Full, Sliding
from runtime.kv.cache_layout import LayerCache
from runtime.kv.cache_types import CacheType
from tests.families.paged_decoder import PagedDecoder
from tests.gguf_files import write_tensors

HIDDEN, ROWS, TOKENS = 16, 11, [3, 9, 0, 4]
EMBEDDING = np.random.default_rng(0).standard_normal((ROWS, HIDDEN), dtype=np.float32)
KEYS = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "llama.embedding_length": HIDDEN,
    "llama.context_length": 128,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
}
FULL, WINDOW = LayerCache(Full(), 2, 8, 8), LayerCache(Sliding(2), 2, 8, 8)


class Noting:
    """A block that adds one and remembers its steps."""

    row_elements = matrix_elements = 64

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        self.steps.append(step)
        return step.kept(x) + 1


class Counting(Rotary):
    """Counts how often its angles are computed."""

    calls = 0

    def __call__(self, positions: Tensor):
        Counting.calls += 1
        return super().__call__(positions)


@pytest.fixture
def make(tmp_path):
    """A function from layers to their decoder over a tiny embedding."""

    def build(
        layers: list[TextLayer], *, keys=None, tensors=None, dtype=torch.float32, **options
    ) -> Decoder:
        arrays = {"token_embd": EMBEDDING, "output_norm": np.ones(HIDDEN)} | (tensors or {})
        path = write_tensors(tmp_path / "tiny.gguf", {f"{n}.weight": arrays[n] for n in arrays})
        sizes = TextSizes.read(Metadata(KEYS | (keys or {}), path=path))
        w = TensorScope(GGUFFile.open(path), device=torch.device("cpu"), dtype=dtype)
        decoder = Decoder(w, sizes, layers, DecoderOptions(**options))
        w.check()
        return decoder

    return build


def logits(x: Tensor, head: np.ndarray = EMBEDDING) -> Tensor:
    normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return normal @ torch.from_numpy(head).T


def embedded() -> Tensor:
    return torch.from_numpy(EMBEDDING[TOKENS])


def test_the_embedding_passes_all_layers_and_the_tied_head(make) -> None:
    decoder = make([TextLayer(Noting(), FULL) for _ in range(3)])
    got = PagedDecoder(decoder).feed({0: TOKENS})
    torch.testing.assert_close(got, logits(embedded() + 3), rtol=1e-4, atol=1e-4)
    assert decoder.vocab_size == ROWS and decoder.context_length == 128
    assert decoder.weight_bytes == 4 * (EMBEDDING.size + HIDDEN)


def test_only_the_last_layer_drops_rows(make) -> None:
    blocks = [Noting() for _ in range(3)]
    decoder = make([TextLayer(block, FULL) for block in blocks])
    got = PagedDecoder(decoder).feed({0: TOKENS}, outputs=[3, 1])
    torch.testing.assert_close(got, logits(embedded() + 3)[[3, 1]], rtol=1e-4, atol=1e-4)
    assert [block.steps[0].rows is None for block in blocks] == [True, True, False]


def test_each_layer_has_its_own_rotation_and_each_is_computed_once(make) -> None:
    near, far = (Counting(plain_frequencies(8, base), Pairs.NEOX) for base in (10.0, 1e6))
    blocks = [Noting() for _ in range(4)]
    tables = [near, far, None, near]
    decoder = make([TextLayer(b, FULL, table) for b, table in zip(blocks, tables, strict=True)])
    Counting.calls = 0
    PagedDecoder(decoder).feed({0: TOKENS})
    first, second, none, again = (block.steps[0].rotation for block in blocks)
    assert Counting.calls == 2 and none is None and first is again
    torch.testing.assert_close(first.cos, (torch.arange(4)[:, None] * near.frequencies).cos())
    assert not torch.equal(first.cos, second.cos)


def test_layers_may_read_what_an_earlier_one_has_stored(make) -> None:
    blocks = [Noting() for _ in range(4)]
    layers = [TextLayer(blocks[0], FULL), TextLayer(blocks[1], WINDOW)]
    layers += [TextLayer(blocks[2], FULL, reads=0), TextLayer(blocks[3], WINDOW, reads=1)]
    decoder = make(layers)
    assert list(decoder.cache_layers) == [FULL, WINDOW]
    paged = PagedDecoder(decoder)
    paged.feed({0: TOKENS})
    steps = [block.steps[0] for block in blocks]
    assert steps[2].pages is steps[0].pages and steps[3].pages is steps[1].pages
    assert steps[3].plan.visible_begin.tolist() == [0, 0, 1, 2]
    assert steps[2].plan.visible_begin.tolist() == [0, 0, 0, 0]


def test_embeddings_are_scaled_logits_capped_and_unknown_tokens_impossible(make) -> None:
    keys = {"tokenizer.ggml.tokens": ["a"] * 9}
    decoder = make([TextLayer(Noting(), FULL)], keys=keys, embedding_scale=4.0, logit_softcap=2.0)
    got = PagedDecoder(decoder).feed({0: TOKENS})
    expected = 2.0 * torch.tanh(logits(4 * embedded() + 1) / 2.0)
    torch.testing.assert_close(got[:, :9], expected[:, :9], rtol=1e-4, atol=1e-4)
    assert (got[:, 9:] == -torch.inf).all() and got.shape[1] == ROWS


def test_tokens_that_the_file_suppresses_are_impossible(make) -> None:
    """Ids beyond the embedding are of tokens that the model does not know either."""
    key = "tokenizer.ggml.suppress_tokens"
    decoder = make([TextLayer(Noting(), FULL)], keys={key: [6, 2, ROWS, -1, 2]})
    got = PagedDecoder(decoder).feed({0: TOKENS})
    assert [column for column in range(ROWS) if (got[:, column] == -torch.inf).all()] == [2, 6]
    others = [column for column in range(ROWS) if column not in (2, 6)]
    expected = logits(embedded() + 1)
    torch.testing.assert_close(got[:, others], expected[:, others], rtol=1e-4, atol=1e-4)
    for wrong in ([1] * (ROWS + 1), 5, ["a"]):
        with pytest.raises(ModelFileError, match="suppress_tokens"):
            make([TextLayer(Noting(), FULL)], keys={key: wrong})


def test_a_head_may_be_shorter_than_the_embedding(make) -> None:
    head = EMBEDDING[::-1][:7].copy()
    decoder = make([TextLayer(Noting(), FULL)], tensors={"output": head}, head_rows=7)
    got = PagedDecoder(decoder).feed({0: TOKENS})
    torch.testing.assert_close(got[:, :7], logits(embedded() + 1, head), rtol=1e-4, atol=1e-4)
    assert (got[:, 7:] == -torch.inf).all() and got.shape[1] == decoder.vocab_size == ROWS
    with pytest.raises(ModelFileError, match=r"output\.weight is 7 x 16, not 11 x 16"):
        make([TextLayer(Noting(), FULL)], tensors={"output": head})


def test_each_layer_gets_its_own_layer_input(make) -> None:
    blocks = [Noting() for _ in range(2)]
    decoder = make(
        [TextLayer(block, FULL) for block in blocks],
        embedding_scale=2.0,
        layer_inputs=lambda x, batch: torch.stack([x, x + batch.tokens[:, None]], dim=1),
    )
    PagedDecoder(decoder).feed({0: TOKENS})
    first, second = (block.steps[0].layer_input for block in blocks)
    torch.testing.assert_close(first, 2 * embedded())
    torch.testing.assert_close(second, 2 * embedded() + torch.tensor(TOKENS)[:, None])


def test_image_rows_are_not_scaled_and_deep_features_are_added_after_layers(make) -> None:
    decoder = make([TextLayer(Noting(), FULL) for _ in range(3)], embedding_scale=4.0)
    features = torch.randn(6, 3 * HIDDEN, generator=torch.Generator().manual_seed(1))
    paged = PagedDecoder(decoder)
    paged.show(0, [(ImageSpan(1, 2, False, b"x", first_row=3), features)])
    expected = 4 * embedded() + 3
    expected[1:3] = features[3:5].unflatten(1, (3, HIDDEN)).sum(1) + 3
    torch.testing.assert_close(paged.feed({0: TOKENS}), logits(expected), rtol=1e-4, atol=1e-4)


@pytest.fixture(params=["kernels in C", "torch twins"])
def kernels(request, monkeypatch) -> str:
    """Both ways to compute a product; CUDA takes the second."""
    if request.param == "torch twins":
        for module in ("matmul", "pointwise"):
            monkeypatch.setattr(f"runtime.kernels.{module}.library", lambda: None)
    return request.param


def test_logits_of_a_model_in_16_bits_are_computed_in_float32(make, kernels) -> None:
    """In bfloat16 logits between 16 and 32 have steps of 0.125, and these two tokens would tie."""
    head = EMBEDDING.copy()
    head[6] = 2 * (embedded()[0] + 1).sign().numpy()
    head[5] = head[6] * (1 - 2**-11)
    keep = {"output_norm": np.ones(HIDDEN), "output": head}
    decoder = make([TextLayer(Noting(), FULL)], tensors=keep, dtype=torch.bfloat16)
    paged = PagedDecoder(decoder, type=CacheType.BFLOAT16)
    got = paged.feed({0: TOKENS})
    residual = (embedded().bfloat16() + 1).double()
    expected = logits(residual, head.astype(np.float64))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    low, high = got[0, 5:7]
    assert 16 < low < high < 32 and low.bfloat16() == high.bfloat16()
    assert got[0].argmax() == 6


def test_states_for_pooling_are_float32_whatever_the_model_computes_in(make) -> None:
    decoder = make([TextLayer(Noting(), FULL)], dtype=torch.bfloat16)
    states = PagedDecoder(decoder, type=CacheType.BFLOAT16).states({0: TOKENS})
    residual = (embedded().bfloat16() + 1).double()
    expected = residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(states.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("attention.sliding_window_pattern", -1, "-1"),
        ("attention.sliding_window_pattern", [True], "1 entries for 3 layers"),
        ("attention.head_count_kv", 3, "does not divide 2"),
        ("attention.key_length", 1 << 20, "1,048,576"),
    ],
)
def test_impossible_sizes_are_refused_by_key(tmp_path, key, value, words) -> None:
    metadata = Metadata(KEYS | {f"llama.{key}": value}, path=tmp_path / "tiny.gguf")
    with pytest.raises(ModelFileError, match=f"llama.{key}.*{words}"):
        TextSizes.read(metadata).sliding_layers(6)


def test_a_pattern_is_a_period_or_a_list_of_layers(tmp_path) -> None:
    def pattern(value) -> tuple[bool, ...]:
        stated = {} if value is None else {"llama.attention.sliding_window_pattern": value}
        metadata = Metadata(KEYS | stated, path=tmp_path / "tiny.gguf")
        return TextSizes.read(metadata).sliding_layers(2)

    assert pattern(None) == (True, False, True)
    assert pattern(3) == (True, True, False)
    assert pattern(1) == (False, False, False)
    assert pattern(0) == (True, True, True)
    assert pattern([False, True, True]) == (False, True, True)
