"""A configured model that is pulled at start, with its own parameters, prompt and projector."""

import asyncio
import json
import os
from pathlib import Path

import numpy as np
import pytest

from model_zoo.chat.messages import Message
from model_zoo.gguf.pooling_types import MEAN, NONE
from model_zoo.rank_part import files_digest
from model_zoo.store.store import Store
from runtime.engine.request import SamplingParams
from runtime.errors import ConfigurationError, ModelFileError, SourceError
from serve_app.config.options import Options
from serve_app.config.settings import ModelSettings
from serve_app.gateway.model_registry import configured_model
from serve_app.messages.tasks import ChatTask, Conversation, RawText
from serve_app.replica.file_headers import listed_file, listed_model
from serve_app.replica.loading import load_replica
from serve_app.replica.model_check import check_model
from serve_app.replica.model_files import local_files, pulled_files
from tests.checkout import DEMO_MODEL
from tests.gguf_files import rewrite
from tests.loopback import Server, digest, serving
from tests.published import Registry
from tests.reply_transcripts import COMMAND_R
from tests.tiny_models import write_tiny_llama
from tests.tiny_vision_model import write_tiny_vision_model
from tests.unit.serve_app import loaded_replicas
from tests.unit.serve_app.answers import answer_of
from tests.unit.serve_app.cli.cli_runs import put

LAYERS = [
    ("model", DEMO_MODEL.read_bytes()),
    ("template", b"{{ .Prompt }}{{ .Color }}"),
    ("params", b'{"temperature": 0.25, "num_ctx": 128, "stop": ["<end>"], "tfs_z": 2}'),
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
    source = f"ollama://{server.host}/library/demo" if server else str(DEMO_MODEL)
    return loaded_replicas.settings(**{"source": source, "context_tokens": None, **change})


def prompt_tokens(replica, *messages) -> int:
    task = ChatTask("t", "demo", Conversation(messages), SamplingParams(seed=1), max_tokens=1)
    return prompt_tokens_of(replica, task)


def prompt_tokens_of(replica, task: ChatTask) -> int:
    usage = asyncio.run(answer_of(replica, task)).usage
    assert usage is not None
    return usage.prompt_tokens


def test_a_pulled_model_is_served_with_its_own_parameters(registry, capsys) -> None:
    configured = settings(registry)
    plain = load_replica(settings(context_tokens=128))
    asked, own = Message("user", "hi"), Message("system", "Be brief.")
    expected = prompt_tokens(plain, own, asked)
    plain.close()
    replica = load_replica(configured)
    card = replica.describe()
    assert prompt_tokens(replica, asked) == expected
    replica.close()
    assert card.options.given() == {"temperature": 0.25, "stop": ("<end>",)}
    assert (card.system, card.license, card.context_tokens) == ("Be brief.", "MIT", 128)
    assert "{{ .Prompt }}" not in (card.chat_template or "")  # it is not supported
    written = capsys.readouterr().err.splitlines()
    lines = [json.loads(line) for line in written if line.startswith("{")]
    unused = " ".join(line["what"] for line in lines if line["event"] == "not used")
    assert 'option "tfs_z" is not known' in unused
    assert "template: line 1: the field .Color is not supported" in unused
    pulled = [line for line in lines if line["event"] == "pull"]
    assert pulled[-1]["status"] == "success"
    assert {line["percent"] for line in pulled if "percent" in line} >= {0, 100}


def test_ranks_tell_versions_of_a_model_with_equal_headers_apart(tmp_path) -> None:
    """Each rank finds the files itself, and the model may be pulled again meanwhile."""
    write_tiny_llama(tmp_path / "tiny.gguf")
    weights = (tmp_path / "tiny.gguf").read_bytes()
    digests = []
    for version in (weights, weights[:-1] + b"x"):
        put(Store(tmp_path / "store"), "tiny", {"model": version})
        configured = ModelSettings(name="m", source="ollama://tiny")
        files = local_files(configured, {"CARAVAN_MODELS": str(tmp_path / "store")})
        assert files is not None
        digests.append(files_digest(files.path, files.adapters, blobs=files.blobs))
    assert digests[0] != digests[1]


def test_options_that_a_file_recommends_are_below_those_of_its_model(store, tmp_path) -> None:
    stated = {
        "temp": 0.6,
        "top_k": 20,
        "xtc_threshold": 9,
        "penalty_repeat": 1.5,
        "sequence": "k;p",
    }
    keys = {f"general.sampling.{name}": value for name, value in stated.items()}
    path = rewrite(DEMO_MODEL, tmp_path / "recommending.gguf", keys=keys)
    put(Store(store), "own", {"model": path.read_bytes(), "params": b'{"temperature": 0.25}'})
    recommended = Options(temperature=pytest.approx(0.6), top_k=20, repeat_penalty=1.5)
    for source, expected in (
        (str(path), recommended),
        ("ollama://own", Options(temperature=0.25).over(recommended)),
    ):
        model = settings(source=source, context_tokens=64)
        replica, listed = load_replica(model), listed_model(model, os.environ)
        card = replica.describe()
        replica.close()
        assert listed is not None and listed.options == card.options == expected
        configured = model.model_copy(update={"defaults": {"top_k": 5}})
        served = configured_model(configured, listed)
        known = Options(top_k=5).over(recommended) if source == str(path) else Options(top_k=5)
        assert (served.options, served.brings_options) == (known, source != str(path))


@pytest.mark.parametrize("for_tools", ["{{ tools }}", COMMAND_R])
def test_a_file_with_a_template_for_tools_has_the_capability(for_tools: str, tmp_path) -> None:
    """Even if that is not used and the model gets tools as text, as Command-R does."""
    keys = {
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": for_tools,
    }
    path = rewrite(DEMO_MODEL, tmp_path / "named.gguf", keys=keys)
    stated = settings(source=str(path), context_tokens=64)
    listed = listed_model(stated, os.environ)
    assert listed is not None and "tools" in listed.capabilities
    assert "tools" in loaded_capabilities(stated)


def test_a_pulled_go_template_is_used_and_listed() -> None:
    source = "{{ if .Suffix }}{{ .Suffix }}{{ else }}ab{{ .Prompt }}{{ end }}<think></think>"
    published = Registry()
    published.publish("library/demo:latest", [LAYERS[0], ("template", source.encode())])
    with serving(published) as server:
        stated = settings(server, context_tokens=128)
        replica = load_replica(stated)
        card = replica.describe()
        raw = RawText("abhi<think></think>")
        task = ChatTask("t", "demo", raw, SamplingParams(seed=1), max_tokens=1)
        assert prompt_tokens(replica, Message("user", "hi")) == prompt_tokens_of(replica, task)
        replica.close()
        listed = listed_model(stated, os.environ)
    assert card.chat_template == source
    assert {"insert", "thinking"} <= set(card.capabilities)
    assert listed is not None and listed.capabilities == card.capabilities


def test_the_configuration_overrides_the_models_own_settings(registry) -> None:
    files = pulled_files(settings(registry, system=""), os.environ)
    assert files.prompt_defaults.system is None
    files = pulled_files(settings(registry, system="Be long."), os.environ)
    assert files.prompt_defaults.system == "Be long."
    replica = load_replica(settings(registry, context_tokens=64))
    assert replica.describe().context_tokens == 64
    replica.close()


@pytest.mark.parametrize(
    ("num_ctx", "configured", "served", "reason"),
    [(64, None, 64, None), (100_000, None, 1024, "trained"), (128, 64, 64, "context_tokens")],
)
def test_a_context_shorter_than_the_models_num_ctx_is_logged(
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
    reduced = [line for line in lines if line["event"] == "context reduced"]
    assert len(reduced) == (reason is not None)
    for line in reduced:
        assert (line["num_ctx"], line["context_tokens"]) == (num_ctx, served)
        assert reason in line["reason"]


def test_a_second_start_sends_no_requests_to_the_registry(registry) -> None:
    pulled_files(settings(registry), os.environ)
    requests = len(registry.exchanges)
    assert pulled_files(settings(registry), os.environ) == local_files(
        settings(registry), os.environ
    )
    assert len(registry.exchanges) == requests


def test_the_check_names_a_model_that_is_not_pulled_and_does_not_pull_it(registry, store) -> None:
    note = check_model(settings(registry))
    assert note is not None
    assert "Model demo: ollama://" in note and str(store) in note and "pulls and checks it" in note
    assert registry.exchanges == [] and not store.exists()


def test_a_model_in_the_store_is_checked_like_a_file(registry) -> None:
    pulled_files(settings(registry), os.environ)
    assert check_model(settings(registry)) is None
    with pytest.raises(ConfigurationError, match="Model demo: `context_tokens` is 1,000,000"):
        check_model(settings(registry, context_tokens=1_000_000))


def test_the_error_of_a_failed_pull_names_the_model() -> None:
    with serving(Registry()) as server, pytest.raises(SourceError, match="Model demo: ollama://"):
        load_replica(settings(server))


def test_a_configured_system_prompt_applies_to_a_model_from_a_path() -> None:
    files = local_files(settings(system="Be brief."), {})
    assert files is not None and files.prompt_defaults.system == "Be brief."


def test_a_missing_projector_is_an_error() -> None:
    with pytest.raises((ConfigurationError, ModelFileError), match=r"Model demo: .*nowhere\.gguf"):
        check_model(settings(projector="nowhere.gguf"))


@pytest.fixture(scope="module")
def vision_files(tmp_path_factory) -> tuple[Path, Path]:
    """A text model and its projector."""
    path = tmp_path_factory.mktemp("vision") / "tiny.gguf"
    projector = write_tiny_vision_model(path, flavour="llama.cpp")
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


def test_the_projector_of_a_pulled_model_is_used(vision_files) -> None:
    with serving(published(*vision_files)) as server:
        stated = settings(server, context_tokens=64)
        assert "vision" in loaded_capabilities(stated)
        assert check_model(stated) is None


def test_a_configured_projector_replaces_the_pulled_one(vision_files, tmp_path) -> None:
    model, projector = vision_files
    (tmp_path / "other.gguf").write_bytes(DEMO_MODEL.read_bytes())
    with serving(published(model, tmp_path / "other.gguf")) as server:
        stated = settings(server, context_tokens=64, projector=str(projector))
        assert "vision" in loaded_capabilities(stated)


def test_an_unsupported_projector_of_a_pulled_model_is_not_used_and_logged(
    vision_files, tmp_path, capsys
) -> None:
    text_model = tmp_path / "text.gguf"
    write_tiny_llama(text_model)
    with serving(published(text_model, vision_files[1])) as server:
        assert "vision" not in loaded_capabilities(settings(server, context_tokens=64))
        assert check_model(settings(server, context_tokens=64)) is None
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (unused,) = [line["what"] for line in lines if line["event"] == "not used"]
    assert unused.startswith("projector: ") and "architecture gemma3, not llama" in unused


def test_the_template_beside_a_renderer_of_ollama_is_not_used() -> None:
    """Ollama uses the renderer, which is code, and the template is a stand-in."""
    config = json.dumps({"model_format": "gguf", "renderer": "speaker"}).encode()
    published = Registry()
    layers = [LAYERS[0], ("template", b"{{ .Prompt }}")]
    manifest = published.publish("library/demo:latest", layers)
    manifest["config"] |= {"digest": digest(config), "size": len(config)}
    published.blobs[digest(config)] = config
    published.manifests["library/demo:latest"] = json.dumps(manifest).encode()
    with serving(published) as server:
        files = pulled_files(settings(server), os.environ)
    assert files.template is None
    assert any("the renderer speaker" in each for each in files.unused)


@pytest.mark.parametrize("matrix", ["dense_2.weight", "dense.0.weight"])
@pytest.mark.parametrize("pooling", [None, NONE, MEAN])
def test_a_model_with_a_vector_for_each_token_is_listed_without_capabilities(
    tmp_path, matrix, pooling
):
    """As LFM2-ColBERT, which cannot be loaded."""
    write_tiny_llama(tmp_path / "tiny.gguf", type="F16")
    path = rewrite(
        tmp_path / "tiny.gguf",
        tmp_path / "tokens.gguf",
        own_keys={"pooling_type": pooling},
        tensors={matrix: np.ones((8, 64), np.float32)},
    )
    listed = listed_file("demo", path, has_projector=False, options=Options(), stored=None)
    assert listed.capabilities == (("embedding",) if pooling == MEAN else ())
