"""A configured draft model: its file, its vocabulary, its memory, and where it is refused."""

import os
from pathlib import Path

import gguf
import pytest

from runtime.engine.request import SamplingParams
from runtime.errors import ConfigurationError, DoesNotFitError, EngineDeadError, ModelFileError
from serve_app.config.settings import ModelSettings, read_settings
from serve_app.messages.tasks import EndRules
from serve_app.replica.loading import load_replica
from serve_app.replica.model_check import check_model
from serve_app.replica.model_files import pull_notice
from tests.families.text_families import TEXT_MODELS
from tests.gguf_files import rewrite
from tests.tiny_models import TinyLlama, write_tiny_llama
from tests.unit.serve_app import loaded_replicas
from tests.unit.serve_app.replica.test_adapted_replica import answer


@pytest.fixture
def files(tmp_path) -> tuple[Path, Path]:
    write_tiny_llama(tmp_path / "tiny.gguf", type="Q8_0")
    write_tiny_llama(tmp_path / "draft.gguf", type="Q4_0")
    return tmp_path / "tiny.gguf", tmp_path / "draft.gguf"


def settings(source: Path, draft: Path | str | None, **change) -> ModelSettings:
    speculation = {"draft": None if draft is None else str(draft), "ngram": False}
    return loaded_replicas.settings(source, speculation=speculation, **change)


def test_a_replica_drafts_and_answers_as_without(files) -> None:
    plain = load_replica(settings(files[0], None))
    drafting = load_replica(settings(*files))
    assert answer(drafting) == answer(plain)
    assert drafting._engine.statistics().drafted_tokens_total > 0
    assert plain._engine.statistics().drafted_tokens_total == 0
    assert drafting.describe().reserved_bytes > plain.describe().reserved_bytes
    assert drafting.identity == plain.identity, "each may continue the answers of the other"
    os.utime(files[1], (0, 0))
    with pytest.raises(EngineDeadError, match=r"draft.gguf was written in place"):
        drafting.check()
    plain.close()
    drafting.close()


def test_parameters_may_name_tokens_that_only_the_larger_vocabulary_has(files) -> None:
    write_tiny_llama(files[0], config=TinyLlama(padding_rows=64), type="Q8_0")
    plain = load_replica(settings(files[0], None))
    drafting = load_replica(settings(*files))
    size = plain._model.decoder.vocab_size
    last, words = size - 1, -(-size // 32)
    sampling = SamplingParams(
        seed=1,
        logit_bias=((last, -1.0),),
        allowed=(2**size - 1).to_bytes(4 * words, "little"),
        bad_words=((last,), (5, last)),
    )
    ending = EndRules(min_tokens=20, tokens=(last,))
    asked = {"sampling": sampling, "ending": ending, "max_tokens": 40}
    assert answer(drafting, **asked) == answer(plain, **asked)
    assert drafting._engine.statistics().drafted_tokens_total > 0
    plain.close()
    drafting.close()


def test_missing_memory_names_the_draft_model(files) -> None:
    with pytest.raises(DoesNotFitError, match=r"[0-9,]+ for the draft model"):
        load_replica(settings(*files, memory_bytes=2**20))


def test_a_draft_that_has_to_be_pulled_is_named(files) -> None:
    asked = settings(files[0], "hf://org/repo/small.gguf")
    assert "hf://org/repo/small.gguf" in pull_notice(asked, {"CARAVAN_STORE": str(files[0])})


def tokens_of(path: Path) -> list[str]:
    return gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].contents()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (lambda tokens: {"tokens": [*tokens[:7], "other", *tokens[8:]]}, "token 7 is 'other'"),
        (lambda tokens: {"eos_token_id": 5}, "`eos_token_id` is 5 instead of"),
        (lambda tokens: {"bos_token_id": 5}, "`bos_token_id` is 5 instead of"),
    ],
)
def test_another_vocabulary_is_refused_before_the_start(files, keys, message) -> None:
    given = {f"tokenizer.ggml.{key}": each for key, each in keys(tokens_of(files[1])).items()}
    draft = rewrite(files[1], files[1].with_name("changed.gguf"), keys=given)
    for start in (check_model, load_replica):
        with pytest.raises(ConfigurationError, match=f"Model demo: .*speculation.draft.*{message}"):
            start(settings(files[0], draft))


def test_a_damaged_or_unfit_draft_is_refused_before_the_start(files, tmp_path) -> None:
    TEXT_MODELS["qwen3next"].write(tmp_path / "recurrent.gguf")
    with pytest.raises(ConfigurationError, match=r"Model demo: .*without recurrent layers"):
        check_model(settings(files[0], tmp_path / "recurrent.gguf"))
    with pytest.raises(ConfigurationError, match=r"Model demo: .*recurrent layers, whose states"):
        check_model(settings(tmp_path / "recurrent.gguf", files[1]))
    files[1].write_bytes(files[1].read_bytes()[:-2000])
    with pytest.raises(ModelFileError, match=r"Model demo: `speculation.draft`: .*draft\.gguf"):
        check_model(settings(*files))


@pytest.mark.parametrize(
    ("change", "key"),
    [({"parallel": {"tensor": 2}}, "parallel.tensor"), ({"num_gpu": 3}, "num_gpu")],
)
def test_one_device_computes_both_models(change, key) -> None:
    model = {"name": "a", "source": "a.gguf", "speculation": {"draft": "b.gguf"}, **change}
    with pytest.raises(ConfigurationError, match=rf"speculation.draft and {key} exclude"):
        read_settings({"models": [model]})


def test_models_on_demand_have_no_draft() -> None:
    stated = {"model": {"speculation": {"draft": "b.gguf"}}}
    with pytest.raises(ConfigurationError, match=r"speculation.draft belongs to one model"):
        read_settings({"on_demand": stated})
