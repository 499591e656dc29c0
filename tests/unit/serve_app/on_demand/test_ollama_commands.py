"""Requests of Ollama's command line and clients: stop, pull, show, cp, /save."""

import base64
import json
from pathlib import Path
from typing import Any

import ollama
import pytest

from model_zoo.gguf.reader import GGUFFile
from model_zoo.sources.resolve import ResolvedModel, resolve_stored
from model_zoo.store.model_name import ModelName
from model_zoo.store.store import Store
from tests.loopback import serving as publishing
from tests.published import Registry
from tests.tiny_vision_model import write_tiny_vision_model
from tests.unit.model_zoo.gguf.test_split import split_like_a_converter
from tests.unit.serve_app.cli.cli_runs import put
from tests.unit.serve_app.on_demand.fake_cluster import cluster_of, official, real_loader


def logged(capsys) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines() if line[:1] == "{"]


async def test_unloading_a_configured_model_succeeds_without_effect(root, capsys):
    """`ollama stop` and `ollama rm` send this, and fail if it is refused."""
    async with cluster_of(root) as cluster, official(cluster) as client:
        for _ in range(2):
            reported = await client.generate("fixed", keep_alive=0)
            assert (reported.done, reported.done_reason) == (True, "unload")
        assert (await client.chat("fixed:latest", keep_alive="0s")).done_reason == "unload"
        assert [model.model for model in (await client.ps()).models] == ["fixed:latest"]
    stays = [line for line in logged(capsys) if line["event"] == "not unloaded"]
    assert [line["model"] for line in stays] == ["fixed"], "logged once"


async def all_of(steps) -> list[ollama.ProgressResponse]:
    return [step async for step in await steps]


async def test_a_missing_model_is_reported_in_ollamas_words(root):
    """Scripts around `ollama pull` and `ollama run` look for this sentence."""
    with publishing(Registry()) as server:
        missing = f"{server.host}/library/missing"
        async with (
            cluster_of(root, pull_hosts=[server.host]) as cluster,
            official(cluster) as client,
        ):
            for asked in (
                client.pull(missing),
                client.create("mine", from_=missing),
                all_of(client.pull(missing, stream=True)),
                all_of(client.create("mine", from_=missing, stream=True)),
            ):
                with pytest.raises(ollama.ResponseError) as caught:
                    await asked
                reported = caught.value.error
                assert reported.startswith("pull model manifest: file does not exist")
                assert "library/missing" in reported and "has no such model" in reported


def stored(root: Path, name: str) -> ResolvedModel:
    return resolve_stored(Store(root).open(ModelName.parse(name)), Store(root))


@pytest.fixture
def path(tiny, tmp_path) -> Path:
    (tmp_path / "fixed.gguf").write_bytes(tiny)
    return tmp_path / "fixed.gguf"


SESSION = [
    {"role": "user", "content": "What is the opposite of hot?"},
    {"role": "assistant", "content": "Cold."},
]


async def test_a_session_with_a_configured_model_is_saved(root, path):
    """`/save` of `ollama run` sends this."""
    said = {"system": "Be brief.", "context_tokens": 96, "defaults": {"top_k": 3, "stop": ["."]}}
    async with (
        cluster_of(root, max_loaded_bytes=1 << 30, loaders=real_loader) as cluster,
        official(cluster, source=str(path), **said) as client,
    ):
        steps = await all_of(
            client.create(
                "mine", from_="fixed", parameters={"top_k": 5}, messages=SESSION, stream=True
            )
        )
        assert steps[-1].status == "success"
        read = [step for step in steps if step.total]
        assert read[-1].completed == read[-1].total == path.stat().st_size
        shown = await client.show("mine")
        assert read_parameters(shown.parameters) == {"num_ctx": 96, "top_k": 5, "stop": ["."]}
        answered = await client.generate("mine", "a b", raw=True, options={"num_predict": 1})
        assert answered.eval_count == 1
    made = stored(root, "mine")
    assert made.path.read_bytes() == path.read_bytes() and made.system == "Be brief."
    assert [(turn.role, turn.text) for turn in made.messages] == [
        (turn["role"], turn["content"]) for turn in SESSION
    ]


async def test_a_session_with_images_is_saved_without_them(root, capsys):
    turn = {**SESSION[0], "images": [base64.b64encode(b"a picture").decode()]}
    async with cluster_of(root) as cluster, official(cluster) as client:
        reported = await client.create("mine", from_="kept", messages=[turn, SESSION[1]])
        assert reported.status == "success"
        with pytest.raises(ollama.ResponseError, match=r"messages\[0\].images"):
            body = {"model": "mine", "from": "kept", "messages": [{**turn, "images": [1]}]}
            await client._request(dict, "POST", "/api/create", json=body)
    assert [(each.role, each.content) for each in stored(root, "mine").messages] == [
        (turn["role"], turn["content"]) for turn in SESSION
    ]
    (line,) = (line for line in logged(capsys) if line["event"] == "images not kept")
    assert (line["model"], line["images"]) == ("mine", 1)


async def test_a_request_overrides_the_configuration(root, path):
    async with (
        cluster_of(root) as cluster,
        official(cluster, source=str(path), system="Be brief.") as client,
    ):
        await client.create("mine", from_="FIXED:latest", system="Be long.")
        assert stored(root, "mine").system == "Be long."
        modelfile = {"model": "other", "modelfile": "FROM fixed\nPARAMETER seed 1", "stream": False}
        await client._request(dict, "POST", "/api/create", json=modelfile)
        other = stored(root, "other")
        assert (other.system, other.parameters) == ("Be brief.", {"seed": 1})


async def test_a_configured_model_is_copied_with_its_projector(root, tmp_path):
    folder = tmp_path / "seeing"
    folder.mkdir()
    projector = write_tiny_vision_model(folder / "tiny.gguf", flavour="llama.cpp")
    assert projector is not None
    source = {"source": str(folder / "tiny.gguf"), "projector": str(projector)}
    async with (
        cluster_of(root, loaders=real_loader) as cluster,
        official(cluster, **source) as client,
    ):
        await client.copy("fixed", "me/copy:7b")
        assert "vision" in (await client.show("me/copy:7b")).capabilities
    made = stored(root, "me/copy:7b")
    assert made.projector is not None
    assert made.projector.read_bytes() == projector.read_bytes()
    assert made.path.read_bytes() == (folder / "tiny.gguf").read_bytes()


async def test_all_parts_of_a_split_model_are_copied(root, path, tmp_path):
    first = split_like_a_converter(path, tmp_path, tensors_each=10)
    async with cluster_of(root) as cluster, official(cluster, source=str(first)) as client:
        await client.copy("fixed", "whole")
    made = stored(root, "whole").path
    assert set(GGUFFile.open(made).tensors) == set(GGUFFile.open(path).tensors)


async def test_a_configured_model_from_a_registry_is_a_base_with_its_layers(root, tiny):
    """Its host is configured, so it need not be in `pull_hosts`."""
    published = Registry()
    layers = [("model", tiny), ("params", b'{"top_k": 9, "seed": 1}'), ("template", b"{{ .X }}")]
    published.publish("library/base:latest", [*layers, ("system", b"Be kind.")])
    with publishing(published) as server:
        source = f"ollama://{server.host}/library/base"
        async with (
            cluster_of(root) as cluster,
            official(cluster, source=source, defaults={"seed": 2}) as client,
        ):
            statuses = [
                step.status
                for step in await all_of(client.create("mine", from_="fixed", stream=True))
            ]
            assert statuses.count("success") == 1 and statuses[0] == "pulling manifest"
            with pytest.raises(ollama.ResponseError, match="pull_hosts"):
                await client.create("other", from_=f"{server.host}/library/other")
    made = stored(root, "mine")
    assert (made.system, made.template) == ("Be kind.", "{{ .X }}")
    assert made.parameters == {"top_k": 9, "seed": 2}


async def test_a_configured_name_takes_precedence_over_the_stores(root, path, tiny):
    put(Store(root), "fixed", {"model": tiny, "system": b"I am the store's."})
    async with (
        cluster_of(root) as cluster,
        official(cluster, source=str(path), system="I am configured.") as client,
    ):
        await client.create("one", from_="fixed")
        await client.copy("fixed", "two")
        await client.create("three", from_="ollama://fixed")
    systems = [stored(root, name).system for name in ("one", "two", "three")]
    assert systems == ["I am configured.", "I am configured.", "I am the store's."]


async def test_a_missing_file_of_a_configured_model_is_reported(root, tmp_path):
    source = str(tmp_path / "elsewhere.gguf")
    async with cluster_of(root) as cluster, official(cluster, source=source) as client:
        for asked in (client.create("mine", from_="fixed"), client.copy("fixed", "mine")):
            with pytest.raises(ollama.ResponseError) as caught:
                await asked
            assert caught.value.status_code == 404 and "elsewhere.gguf" in caught.value.error


async def test_pulling_a_configured_model_does_not_contact_a_registry(root, path):
    async with cluster_of(root) as cluster, official(cluster, source=str(path)) as client:
        assert (await client.pull("fixed")).status == "success"
        assert [step.status for step in await all_of(client.pull("fixed", stream=True))] == [
            "success"
        ]
    assert [str(name) for name in Store(root).names()] == ["kept:latest"]


# Every option that Ollama knows or has known, with a value that is not its default.
PARAMETERS = {
    "num_keep": 5,
    "seed": 42,
    "num_predict": 3,
    "top_k": 7,
    "top_p": 0.75,
    "min_p": 0.05,
    "typical_p": 0.5,
    "tfs_z": 0.5,
    "repeat_last_n": 33,
    "temperature": 0.25,
    "repeat_penalty": 1.5,
    "presence_penalty": 1,
    "frequency_penalty": 0.5,
    "mirostat": 2,
    "mirostat_tau": 4.5,
    "mirostat_eta": 0.25,
    "penalize_newline": False,
    "stop": ["<end>", "\n\n", 'say "no"', "a\\nb"],
    "numa": True,
    "num_ctx": 96,
    "num_batch": 128,
    "num_gpu": 0,
    "main_gpu": 0,
    "low_vram": True,
    "f16_kv": True,
    "logits_all": True,
    "vocab_only": False,
    "use_mmap": True,
    "use_mlock": False,
    "num_thread": 3,
    "draft_num_predict": 2,
}


def read_parameters(parameters: str) -> dict[str, Any]:
    """Parameters from lines of names and values; repeated names become a list."""
    found: dict[str, Any] = {}
    for line in parameters.splitlines():
        name, text = line.split(maxsplit=1)
        value = json.loads(text)
        found[name] = [*found.get(name, []), value] if name == "stop" else value
    return found


async def test_the_output_of_show_recreates_the_model(root):
    async with cluster_of(root, loaders=real_loader) as cluster, official(cluster) as client:
        await client.create("one", from_="kept", parameters=PARAMETERS)
        shown = await client.show("one")
        parameters = read_parameters(shown.parameters)
        assert repr(sorted(parameters.items())) == repr(sorted(PARAMETERS.items())), "1 remains 1"
        await client.create("two", from_="kept", parameters=read_parameters(shown.parameters))
        assert (await client.show("two")).parameters == shown.parameters
        body = {"model": "three", "modelfile": shown.modelfile.replace("FROM one", "FROM kept")}
        await client._request(dict, "POST", "/api/create", json={**body, "stream": False})
        again = await client.show("three")
        assert again.parameters == shown.parameters and again.modelfile.startswith("FROM three")


async def test_show_has_the_served_context_and_the_modelfile_the_models_own(root):
    """The context is limited to the 512 tokens that the model was trained for."""
    async with (
        cluster_of(root, max_loaded_bytes=1 << 30, loaders=real_loader) as cluster,
        official(cluster) as client,
    ):
        await client.create("long", from_="kept", parameters={"num_ctx": 4096})
        shown = await client.show("long")
        assert read_parameters(shown.parameters) == {"num_ctx": 512}
        assert "PARAMETER num_ctx 4096" in shown.modelfile.splitlines()
        await client.generate("long", "a b", raw=True, options={"num_predict": 1})
        (running,) = (m for m in (await client.ps()).models if m.model == "long:latest")
        assert running.context_length == 512


async def test_num_ctx_of_a_model_is_shown_and_served(root, capsys):
    async with (
        cluster_of(root, max_loaded_bytes=1 << 30, loaders=real_loader) as cluster,
        official(cluster) as client,
    ):
        await client.create("long", from_="kept", parameters={"num_ctx": 100})
        await client.create("again", from_="long", system="Be brief.")
        assert read_parameters((await client.show("again")).parameters) == {"num_ctx": 100}
        answered = await client.generate("again", "a b", raw=True, options={"num_predict": 1})
        assert answered.eval_count == 1
        (running,) = (m for m in (await client.ps()).models if m.model == "again:latest")
        assert running.context_length == 100
    (loaded,) = (line for line in logged(capsys) if line["event"] == "loaded")
    assert answered.load_duration > (loaded["seconds"] - 0.001) * 1e9, "it was waited for"


@pytest.mark.parametrize(
    ("parameters", "reported"),
    [
        ({"colour": "red"}, 'option "colour" is not known'),
        ({"mirostat": "two"}, 'option "mirostat" must be of type integer'),
        ({"use_mmap": 1}, 'option "use_mmap" must be of type boolean'),
        ({"num_gpu": True}, 'option "num_gpu" must be of type integer'),
        ({"tfs_z": "x"}, 'option "tfs_z" must be of type float32'),
        ({"stop": "end"}, 'option "stop" must be of type array'),
        ({"top_p": 3}, 'option "top_p" is 3'),
    ],
)
async def test_invalid_parameters_are_refused(root, parameters, reported):
    async with cluster_of(root) as cluster, official(cluster) as client:
        with pytest.raises(ollama.ResponseError) as caught:
            await client.create("mine", from_="kept", parameters=parameters)
        assert reported in caught.value.error and caught.value.status_code == 400
