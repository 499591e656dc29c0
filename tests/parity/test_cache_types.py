"""The accuracy of cache types: log-probabilities with each type, compared with float32."""

from functools import partial

import pytest
import torch
from torch import Tensor

from model_zoo.registry import load
from runtime.kv.cache_types import CacheType
from runtime.worker.model import DecoderModel
from tests.families.agreement import DECODED, PROMPT, random_tokens
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import TEXT_MODELS
from tests.parity.test_divided_models import decoder_of
from tests.parity.test_engine import answers, mixed_requests, running
from tests.parity.vision import test_mllama
from tests.thread_ranks import Meeting
from tests.tiny_models import tiny_tokenizer

# The largest and the mean difference of log-probabilities from those with float32. The weights of
# these models are random and large, which multiplies errors; with elements of a block in wrong
# order, the mean is above 1.
BOUNDS = {
    CacheType.FLOAT16: (0.02, 0.002),
    CacheType.BFLOAT16: (0.6, 0.02),
    CacheType.Q8_0: (3.0, 0.08),
    CacheType.FP8: (4.0, 0.3),
    CacheType.Q4_0: (6.0, 0.7),
}
FAMILIES = {
    "dense, shared key heads": "llama",
    "softcap": "gemma2",
    "sliding": "gemma3",
    "latent": "deepseek2",
    "sinks": "gpt-oss",
    "recurrent": "qwen3next",
}


def _log_probabilities(decoder: DecoderModel, type: CacheType) -> Tensor:
    """Of a prompt in two pieces and of decoding, [tokens, vocabulary]."""
    tokens = random_tokens(PROMPT + DECODED, seed=9)
    paged = PagedDecoder(decoder, type=type)
    rows = [paged.feed({0: tokens[:19]}), paged.feed({0: tokens[19:PROMPT]})]
    rows += [paged.feed({0: [token]}) for token in tokens[PROMPT:]]
    return torch.cat(rows).log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_type_stays_near_float32(tmp_path, family: str) -> None:
    pair = TEXT_MODELS[FAMILIES[family]].pair(tmp_path / "tiny.gguf")
    expected = _log_probabilities(pair.decoder, CacheType.FLOAT32)[:, : pair.known]
    means = []
    for type, (most, most_of_mean) in BOUNDS.items():
        errors = (_log_probabilities(pair.decoder, type)[:, : pair.known] - expected).abs()
        assert errors.max() <= most and errors.mean() <= most_of_mean, type
        means.append(errors.mean().item())
    assert means == sorted(means) and means[0] > 0


@pytest.mark.parametrize("type", BOUNDS)
def test_images_of_cross_layers_are_cached_in_each_type(tmp_path, type: CacheType) -> None:
    pair = TEXT_MODELS["mllama"].pair(tmp_path / "tiny.gguf")
    tokens, pictures, expected = test_mllama.scene(pair, "apart_behind_text")
    paged = PagedDecoder(pair.decoder, type=type)
    test_mllama.show(paged, 0, pictures)
    errors = (paged.feed({0: tokens}).log_softmax(-1)[:, : pair.known] - expected).abs()
    assert 0 < errors.mean() <= BOUNDS[type][1]


@pytest.mark.parametrize("type", [CacheType.FLOAT16, CacheType.Q4_0])
def test_ranks_cache_their_heads_in_each_type(tmp_path, type: CacheType) -> None:
    path = tmp_path / "tiny.gguf"
    TEXT_MODELS["llama"].write(path)
    decoder = partial(decoder_of, path)
    known = tiny_tokenizer().get_vocab_size()
    whole = _log_probabilities(decoder(), type)[:, :known]
    for part in Meeting(2).each(lambda ranks: _log_probabilities(decoder(ranks), type)):
        assert (part[:, :known] - whole).abs().mean() <= BOUNDS[type][1]


@pytest.mark.parametrize("type", [CacheType.FLOAT16, CacheType.Q8_0, CacheType.Q4_0])
def test_requests_get_the_same_answers_alone_and_with_shared_pages(
    tmp_path, type: CacheType
) -> None:
    """With prefix hits, chunks of any size and preemption, all from the same stored bits."""
    path = tmp_path / "tiny.gguf"
    TEXT_MODELS["llama"].write(path)
    model = load(path, device=torch.device("cpu"), dtype=torch.float32)
    requests = mixed_requests(model.tokenizer.vocab_size)
    with running(model, kv_dtype=type, prefix_cache=False, step_tokens=256) as engine:
        alone = answers(engine, requests, together=False)
    with running(model, kv_dtype=type, cache_tokens=256) as engine:
        together = answers(engine, requests, together=True)
    statistics = engine.statistics()
    assert [d.tokens for d in together] == [d.tokens for d in alone]
    assert statistics.cached_tokens_total > 0 and statistics.preemptions_total > 0
