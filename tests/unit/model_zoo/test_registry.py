"""Loading a model file gives a ready ChatModel, or a single error that names the cause."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from model_zoo.chat.messages import Message
from model_zoo.registry import LoadOptions, load
from runtime.errors import (
    ConfigurationError,
    ModelFileError,
    RequestError,
    UnsupportedModelError,
)
from tests.gguf_files import rewrite
from tests.tiny_models import END, START, tiny_tokenizer, write_tiny_llama

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_llama(path, config="padded_vocabulary", type="Q8_0")
    return path


def load_here(path: Path, *, projector: Path | None = None, **options):
    return load(
        path,
        projector=projector,
        device=CPU,
        dtype=torch.float32,
        options=LoadOptions(**options),
    )


def refusal(path: Path, kind: type[ModelFileError], **changes) -> str:
    """The message with which `path`, changed so, is refused."""
    broken = rewrite(path, path.with_name("broken.gguf"), **changes)
    with pytest.raises(ModelFileError) as caught:
        load_here(broken)
    assert type(caught.value) is kind
    assert str(broken) in str(caught.value)
    return str(caught.value)


def test_a_file_becomes_a_model_that_tells_its_facts(tiny) -> None:
    heard = []
    model = load_here(tiny, progress=lambda *now: heard.append(now))
    facts = model.description
    tokens = tiny_tokenizer().get_vocab_size()
    assert (facts.architecture, facts.name, facts.license) == ("llama", "tiny", "apache-2.0")
    assert (facts.context_length, facts.embedding_length) == (512, 64)
    assert facts.vocab_size == model.decoder.vocab_size == tokens + 5
    assert model.tokenizer.vocab_size == tokens
    assert facts.file_bytes == tiny.stat().st_size
    assert facts.modified_at == tiny.stat().st_mtime
    assert facts.parameter_count == sum(np.prod(shape) for _, _, shape in facts.tensors)
    assert facts.tensors[0] == ("token_embd.weight", "Q8_0", (64, tokens + 5))
    assert facts.weight_bytes == model.decoder.weight_bytes == heard[-1][0] == heard[-1][1]
    assert facts.metadata["llama.block_count"] == 2
    assert facts.chat_template == model.template.source
    assert facts.template_source == "file"
    assert len(facts.digest) == 64


@pytest.mark.parametrize(
    "stated, shown", [(None, "Q8_0"), (15, "Q4_K_M"), (1, "F16"), (0, "F32"), (1024, "Q8_0")]
)
def test_quantization_is_what_the_file_says_or_else_its_commonest_type(
    tiny, tmp_path, stated, shown
) -> None:
    path = rewrite(tiny, tmp_path / "typed.gguf", keys={"general.file_type": stated})
    assert load_here(path).description.quantization == shown


def test_conversations_are_prepared_with_the_answer_left_open(tiny) -> None:
    model = load_here(tiny)
    library = tiny_tokenizer()
    prompt = model.prepare([Message("user", "hello there")])
    expected = library.encode(f"{START}user\nhello there{END}\n{START}assistant\n").ids
    assert prompt.tokens == tuple(expected) and prompt.spans == ()
    assert model.prepare_text("the fox").tokens == tuple(library.encode("the fox").ids)


def test_tokens_beyond_the_embedding_are_left_out(tiny, tmp_path) -> None:
    rows = tiny_tokenizer().get_vocab_size() + 5
    texts = gguf_tokens(tiny)
    texts += [f"<extra_{number}>" for number in range(7)]
    keys = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": [1] * len(texts)}
    path = rewrite(tiny, tmp_path / "more.gguf", keys=keys)
    model = load_here(path)
    assert len(texts) == rows + 2
    assert model.tokenizer.vocab_size == model.decoder.vocab_size == rows
    assert max(model.prepare_text("<extra_6>").tokens) < rows


def test_the_choice_to_think_reaches_the_template(tiny, tmp_path) -> None:
    template = "{{ 'unset' if enable_thinking is not defined else enable_thinking }}"
    path = rewrite(tiny, tmp_path / "thinks.gguf", keys={"tokenizer.chat_template": template})
    model, message = load_here(path), [Message("user", "hi")]
    texts = [
        model.tokenizer.decode(model.prepare(message, thinking=choice).tokens)
        for choice in (None, True, False)
    ]
    assert texts == ["unset", "True", "False"]


def test_a_model_without_a_template_gets_its_familys_and_says_so(tiny, tmp_path) -> None:
    path = rewrite(tiny, tmp_path / "bare.gguf", keys={"tokenizer.chat_template": None})
    model, message = load_here(path), [Message("user", "hello there")]
    assert model.description.template_source == "fallback (chatml)"
    assert model.prepare(message).tokens == load_here(tiny).prepare(message).tokens


def test_a_base_model_completes_text_only(tiny, tmp_path) -> None:
    keys = {"tokenizer.chat_template": None}
    keys["tokenizer.ggml.tokens"] = [
        "<plain>" if text == START else text for text in gguf_tokens(tiny)
    ]
    model = load_here(rewrite(tiny, tmp_path / "base.gguf", keys=keys))
    assert model.description.chat_template is None and model.description.template_source is None
    assert model.prepare_text("the fox").tokens
    with pytest.raises(RequestError, match=r"model has no chat template"):
        model.prepare([Message("user", "hi")])


def gguf_tokens(path: Path) -> list[str]:
    return gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].contents()


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("general.architecture", "rwkv6", ["rwkv6", "supported are: ", "llama"]),
        ("general.architecture", "clip", ["image projector"]),
        ("general.type", "adapter", ["adapter"]),
        ("llama.pooling_type", 4, ["ranks texts"]),
        ("llama.pooling_type", 7, ["llama.pooling_type", "7"]),
        ("llama.attention.causal", False, ["llama.attention.causal", "all tokens"]),
        ("llama.rope.scaling.type", "dynamic", ["llama.rope.scaling.type", "dynamic"]),
        ("tokenizer.ggml.model", "unheard", ["unheard", "tokenizer.ggml.model"]),
    ],
)
def test_what_is_not_served_is_refused_by_name(tiny, key, value, words) -> None:
    message = refusal(tiny, UnsupportedModelError, keys={key: value})
    assert all(word in message for word in words), message


@pytest.mark.parametrize("pooling", [None, 0])
def test_a_model_with_a_vector_for_each_token_is_refused(tiny, pooling) -> None:
    """As LFM2-ColBERT: the matrix without pooling applies to every token."""
    message = refusal(
        tiny,
        UnsupportedModelError,
        keys={"llama.pooling_type": pooling},
        tensors={"dense_2.weight": np.ones((8, 64), np.float32)},
    )
    assert "llama.pooling_type" in message and "a vector for each token" in message


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("llama.block_count", None, ["missing"]),
        ("llama.block_count", 100_000, ["100,000", "1,024"]),
        ("llama.embedding_length", "wide", ["wide", "integer"]),
        ("llama.embedding_length", 128, ["token_embd.weight is", "x 64, not any x 128"]),
        ("llama.attention.head_count", 0, ["is 0"]),
        ("llama.attention.head_count_kv", 3, ["3", "does not divide 4"]),
        ("llama.attention.key_length", 1 << 30, ["1,073,741,824", "limit"]),
        ("llama.attention.layer_norm_rms_epsilon", -1.0, ["above 0"]),
        ("llama.rope.dimension_count", 7, ["is 7", "even"]),
        ("llama.rope.dimension_count", 18, ["is 18", "at most 16"]),
        ("llama.rope.freq_base", 0.0, ["above 0"]),
        ("llama.rope.scaling.factor", 0.0, ["above 0"]),
        ("llama.feed_forward_length", [96, 96, 96], ["3 entries for 2 layers"]),
        ("tokenizer.ggml.tokens", None, ["tokenizer.ggml.tokens"]),
        ("tokenizer.chat_template", "{% if %}", ["template"]),
    ],
)
def test_values_that_contradict_the_file_are_refused_by_key(tiny, key, value, words) -> None:
    message = refusal(tiny, ModelFileError, keys={key: value})
    named = [] if "token_embd" in words[0] or "template" in words[0] else [key]
    assert all(word in message for word in [*named, *words]), message


def test_tensors_missing_misshapen_and_unknown_are_all_named(tiny) -> None:
    one = np.ones(3, dtype=np.float32)
    message = refusal(
        tiny,
        ModelFileError,
        tensors={
            "blk.0.attn_q.weight": None,
            "blk.1.ffn_norm.weight": None,
            "output_norm.weight": one,
            "blk.1.attn_q_norm.weight": one,
            "rope_freqs.weight": one,
        },
    )
    for word in (
        "2 are missing (blk.0.attn_q.weight, blk.1.ffn_norm.weight)",
        "output_norm.weight is 3, not 64",
        "rope_freqs.weight is 3, not 8",
        "1 is not known to this architecture (blk.1.attn_q_norm.weight)",
    ):
        assert word in message, message


def test_nothing_is_read_of_a_file_that_is_refused(tiny) -> None:
    broken = rewrite(tiny, tiny.with_name("b.gguf"), tensors={"output_norm.weight": None})
    heard = []
    with pytest.raises(ModelFileError, match="output_norm"):
        load_here(broken, progress=lambda *now: heard.append(now))
    assert heard == []


def test_a_projector_for_an_architecture_without_vision_is_refused(tiny) -> None:
    blind = rewrite(tiny, tiny.with_name("gemma2.gguf"), keys={"general.architecture": "gemma2"})
    with pytest.raises(ConfigurationError, match="gemma2 do not support images"):
        load_here(blind, projector=Path("mmproj.gguf"))
