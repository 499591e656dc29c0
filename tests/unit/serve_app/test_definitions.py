"""Definitions of models from Modelfiles and requests: what they say, and what is refused."""

import pytest

from model_zoo.chat.messages import Message
from model_zoo.sources.reference import HubSource, RegistrySource
from model_zoo.store.definition import Definition
from model_zoo.store.model_name import ModelName
from runtime.errors import RequestError
from serve_app.on_demand.definitions import of_fields, of_modelfile, remote_material

BLOB = "sha256:" + "0a" * 32
NOTHING = {
    "base": None,
    "files": {},
    "parameters": {},
    "template": None,
    "system": None,
    "messages": [],
    "licenses": [],
    "quantize": None,
    "materials": remote_material,
}


def read(text: str) -> Definition:
    return of_modelfile(text, remote_material)


def test_a_modelfile_becomes_a_definition():
    text = """FROM tiny:7b
        PARAMETER temperature 1
        PARAMETER stop a
        PARAMETER num_ctx 256
        PARAMETER stop "b c"
        PARAMETER use_mmap true
        SYSTEM Be brief.
        TEMPLATE {{ messages[0].content }}
        MESSAGE user hi
        MESSAGE assistant ho
        LICENSE MIT"""
    assert read(text) == Definition(
        base=RegistrySource(ModelName.parse("tiny:7b")),
        parameters={"temperature": 1, "stop": ["a", "b c"], "num_ctx": 256, "use_mmap": True},
        system="Be brief.",
        template="{{ messages[0].content }}",
        messages=(Message("user", "hi"), Message("assistant", "ho")),
        licenses=("MIT",),
    )


def test_what_is_not_said_is_not_in_it():
    assert read("FROM a") == Definition(base=RegistrySource(ModelName.parse("a")))


def test_an_empty_text_takes_the_bases_away():
    assert read('FROM a\nSYSTEM ""').system == ""


@pytest.mark.parametrize("text", ["hf://org/repo:Q4_K_M", "HF://x"])
def test_a_base_may_be_elsewhere(text):
    if text.startswith("HF"):
        with pytest.raises(RequestError, match="is not known"):
            remote_material(text)
    else:
        assert isinstance(remote_material(text).base, HubSource)


def test_files_are_named_by_the_digests_of_their_blobs():
    other = "sha256:" + "1b" * 32
    definition = read(f"FROM @{BLOB}\nFROM @{other.replace(':', '-')}")
    assert definition.base is None and list(definition.files.values()) == [BLOB, other]


PATHS = [
    "/etc/passwd",
    "./model.gguf",
    "../model",
    "~/model",
    "model.gguf",
    "folder/model.GGUF",
    "C:\\models\\m",
    "\\\\host\\share",
    ".",
    "/root/.caravan/models/blobs/sha256-" + "0a" * 32,
]


@pytest.mark.parametrize("path", PATHS)
def test_no_path_of_the_server_is_reachable(path):
    with pytest.raises(RequestError, match=r"line 1: .* is a path, and files of the server"):
        read(f"FROM {path}")
    with pytest.raises(RequestError, match="is a path"):
        of_fields(**{**NOTHING, "base": path})


@pytest.mark.parametrize(
    "base", ["file:///etc/passwd", "http://x/y", "a b", "a/b/c/d", "@sha256:1"]
)
def test_what_names_no_model_is_refused(base):
    with pytest.raises(RequestError):
        remote_material(base)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("FROM a\nPARAMETER colour red", 'line 2: option "colour" is not known'),
        ("FROM a\nPARAMETER top_k many", 'line 2: option "top_k" must be of type integer'),
        ("FROM a\nPARAMETER top_p 3", 'line 2: option "top_p" is 3'),
        ("FROM a\nPARAMETER mirostat two", 'line 2: option "mirostat" must be of type'),
        ("FROM a\nTEMPLATE {{ .Prompt }}", "line 2: template error: it is in Go's template"),
        ("FROM a\nTEMPLATE {% for %}", "line 2: template error: "),
        ("FROM a\nFROM b", "FROM names more"),
        (f"FROM a\nFROM @{BLOB}", "FROM names more"),
    ],
)
def test_what_makes_no_sense_is_told_with_its_line(text, told):
    with pytest.raises(RequestError) as caught:
        read(text)
    assert told in str(caught.value)


def test_the_fields_of_a_request_say_the_same():
    said = of_fields(
        **{
            **NOTHING,
            "base": "tiny:7b",
            "parameters": {"top_k": 3, "seed": None},
            "system": "Be brief.",
            "messages": [Message("user", "hi")],
            "licenses": ["", "MIT"],
            "template": "",
        }
    )
    assert said == Definition(
        base=RegistrySource(ModelName.parse("tiny:7b")),
        parameters={"top_k": 3},
        system="Be brief.",
        messages=(Message("user", "hi"),),
        licenses=("MIT",),
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, "neither 'from' or 'files' was specified"),
        ({"base": "a", "files": {"m.gguf": BLOB}}, "exclude each other"),
        ({"base": "a", "parameters": {"top_k": "x"}}, 'option "top_k" must be of type integer'),
        ({"base": "a", "template": "{{ .Prompt }}"}, "Go's template language"),
    ],
)
def test_fields_that_make_no_sense_are_refused(change, told):
    with pytest.raises(RequestError, match=told):
        of_fields(**{**NOTHING, **change})
