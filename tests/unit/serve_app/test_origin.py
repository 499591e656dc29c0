"""A configured model that comes from elsewhere: pulled at start, with what it brings beside it."""

import asyncio
import json
import os
from contextlib import aclosing
from pathlib import Path

import pytest

from model_zoo.chat.messages import Message
from runtime.engine.request import SamplingParams
from runtime.errors import ConfigurationError, ModelFileError, SourceError
from serve_app.config.settings import ModelSettings
from serve_app.gateway.tasks import ChatTask, Conversation, merge
from serve_app.replica.loading import check_model, load_replica
from serve_app.replica.resolved_model import fetched_origin, present_origin
from tests.loopback import Server, serving
from tests.published import Registry
from tests.tiny_models import write_tiny_llama
from tests.tiny_seeing import write_tiny_seeing

DEMO = Path(__file__).parents[3] / "models" / "demo.gguf"
LAYERS = [
    ("model", DEMO.read_bytes()),
    ("template", b"{{ .Prompt }}"),
    ("params", b'{"temperature": 0.25, "num_ctx": 128, "stop": ["<end>"], "mirostat": 2}'),
    ("system", b"Be brief."),
    ("license", b"MIT"),
]


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CARAVAN_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture
def registry():
    published = Registry()
    published.publish("library/demo:latest", LAYERS)
    with serving(published) as server:
        yield server


def settings(server: Server | None = None, **change) -> ModelSettings:
    source = f"ollama://{server.host}/library/demo" if server else str(DEMO)
    stated = {"name": "demo", "source": source, "device": "cpu", "max_sequences": 2, **change}
    return ModelSettings(**stated)


def prompt_tokens(replica, *messages) -> int:
    task = ChatTask("t", "demo", Conversation(messages), SamplingParams(seed=1), max_tokens=1)

    async def answer() -> int:
        async with aclosing(replica.generate(task)) as deltas:
            whole = merge([delta async for delta in deltas])
        assert whole.usage is not None
        return whole.usage.prompt_tokens

    return asyncio.run(answer())


def test_a_model_is_pulled_at_start_and_brings_its_parameters(registry, capsys) -> None:
    configured = settings(registry)
    plain = load_replica(settings(context_tokens=128))
    asked, own = Message("user", "hi"), Message("system", "Be brief.")
    expected = prompt_tokens(plain, own, asked)
    plain.close()
    replica = load_replica(configured)
    card = replica.describe()
    assert prompt_tokens(replica, asked) == expected
    replica.close()
    assert card.options.said() == {"temperature": 0.25, "stop": ("<end>",)}
    assert (card.system, card.license, card.context_tokens) == ("Be brief.", "MIT", 128)
    assert "{{ .Prompt }}" not in (card.chat_template or "")
    written = capsys.readouterr().err.splitlines()
    lines = [json.loads(line) for line in written if line.startswith("{")]
    left_alone = " ".join(line["what"] for line in lines if line["event"] == "left alone")
    assert 'option "mirostat" is not known' in left_alone
    assert "language of Go; the file's own is used" in left_alone
    pulled = [line for line in lines if line["event"] == "pull"]
    assert pulled[-1]["status"] == "success"
    assert {line["percent"] for line in pulled if "percent" in line} >= {0, 100}


def test_settings_go_before_what_the_model_brings(registry) -> None:
    origin = fetched_origin(settings(registry, system=""), os.environ)
    assert origin.opening.system is None
    origin = fetched_origin(settings(registry, system="Be long."), os.environ)
    assert origin.opening.system == "Be long."
    replica = load_replica(settings(registry, context_tokens=64))
    assert replica.describe().context_tokens == 64
    replica.close()


@pytest.mark.parametrize(
    ("num_ctx", "configured", "served", "reason"),
    [(64, None, 64, None), (100_000, None, 1024, "trained"), (128, 64, 64, "context_tokens")],
)
def test_a_shorter_context_than_the_model_asks_for_is_logged(
    num_ctx, configured, served, reason, capsys
) -> None:
    published = Registry()
    layers = [LAYERS[0], ("params", json.dumps({"num_ctx": num_ctx}).encode())]
    published.publish("library/demo:latest", layers)
    with serving(published) as server:
        replica = load_replica(settings(server, context_tokens=configured))
    assert replica.describe().context_tokens == served
    replica.close()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line[:1] == "{"]
    told = [line for line in lines if line["event"] == "context reduced"]
    assert len(told) == (reason is not None)
    for line in told:
        assert (line["num_ctx"], line["context_tokens"]) == (num_ctx, served)
        assert reason in line["reason"]


def test_a_replica_that_starts_again_asks_nobody(registry) -> None:
    fetched_origin(settings(registry), os.environ)
    asked = len(registry.exchanges)
    assert fetched_origin(settings(registry), os.environ) == present_origin(
        settings(registry), os.environ
    )
    assert len(registry.exchanges) == asked


def test_a_model_that_has_yet_to_be_pulled_is_told_and_not_fetched(registry, store) -> None:
    note = check_model(settings(registry))
    assert note is not None
    assert "Model demo: ollama://" in note and str(store) in note and "pulls it" in note
    assert registry.exchanges == [] and not store.exists()


def test_a_model_in_the_store_is_checked_like_a_file(registry) -> None:
    fetched_origin(settings(registry), os.environ)
    assert check_model(settings(registry)) is None
    with pytest.raises(ConfigurationError, match="Model demo: `context_tokens` is 1,000,000"):
        check_model(settings(registry, context_tokens=1_000_000))


def test_a_pull_that_fails_is_told_by_the_models_name() -> None:
    with serving(Registry()) as server, pytest.raises(SourceError, match="Model demo: ollama://"):
        load_replica(settings(server))


def test_a_systems_text_of_the_settings_serves_models_from_files_too() -> None:
    origin = present_origin(settings(system="Be brief."), {})
    assert origin is not None and origin.opening.system == "Be brief."


def test_a_projector_that_is_not_there_is_told() -> None:
    with pytest.raises((ConfigurationError, ModelFileError), match=r"Model demo: .*nowhere\.gguf"):
        check_model(settings(projector="nowhere.gguf"))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> tuple[Path, Path]:
    """A model, and the file with its eyes."""
    path = tmp_path_factory.mktemp("seeing") / "tiny.gguf"
    projector = write_tiny_seeing(path, flavour="llama.cpp")
    assert projector is not None
    return path, projector


def published(*files: Path) -> Registry:
    kinds = ("model", "projector")
    registry = Registry()
    layers = [(kind, file.read_bytes()) for kind, file in zip(kinds, files, strict=False)]
    registry.publish("library/demo:latest", layers)
    return registry


def loaded_capabilities(settings: ModelSettings) -> tuple[str, ...]:
    replica = load_replica(settings)
    replica.close()
    return replica.describe().capabilities


def test_a_projector_that_a_model_brings_is_used(seeing) -> None:
    with serving(published(*seeing)) as server:
        stated = settings(server, context_tokens=64)
        assert "vision" in loaded_capabilities(stated)
        assert check_model(stated) is None


def test_a_configured_projector_goes_before_the_one_that_a_model_brings(seeing, tmp_path) -> None:
    model, projector = seeing
    (tmp_path / "other.gguf").write_bytes(DEMO.read_bytes())
    with serving(published(model, tmp_path / "other.gguf")) as server:
        stated = settings(server, context_tokens=64, projector=str(projector))
        assert "vision" in loaded_capabilities(stated)


def test_a_brought_projector_that_cannot_be_used_is_left_alone_and_told(
    seeing, tmp_path, capsys
) -> None:
    """Such models were served before anything here could see."""
    blind = tmp_path / "blind.gguf"
    write_tiny_llama(blind)
    with serving(published(blind, seeing[1])) as server:
        assert "vision" not in loaded_capabilities(settings(server, context_tokens=64))
        assert check_model(settings(server, context_tokens=64)) is None
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (told,) = [line["what"] for line in lines if line["event"] == "left alone"]
    assert told.startswith("projector: ") and "architecture gemma3, not llama" in told
