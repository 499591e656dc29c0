"""Definitions of models from Modelfiles and from requests."""

import pytest

from model_zoo.chat.messages import Message
from model_zoo.sources.reference import HubSource, RegistrySource
from model_zoo.store.definition import Definition
from model_zoo.store.model_name import ModelName
from runtime.errors import RequestError
from serve_app.on_demand.definitions import (
    base_from_request,
    definition_from_fields,
    definition_from_modelfile,
)

BLOB = "sha256:" + "0a" * 32


def read(text: str) -> Definition:
    return definition_from_modelfile(text, base_from_request)


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


def test_absent_commands_set_nothing():
    assert read("FROM a") == Definition(base=RegistrySource(ModelName.parse("a")))


def test_an_empty_text_removes_that_of_the_base():
    assert read('FROM a\nSYSTEM ""').system == ""


@pytest.mark.parametrize("text", ["hf://org/repo:Q4_K_M", "HF://x"])
def test_a_base_may_be_a_source_to_pull(text):
    if text.startswith("HF"):
        with pytest.raises(RequestError, match="is not known"):
            base_from_request(text)
    else:
        assert isinstance(base_from_request(text).base, HubSource)


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
    with pytest.raises(RequestError, match=r"line 1: .* is a path, and requests cannot read files"):
        read(f"FROM {path}")
    with pytest.raises(RequestError, match="is a path"):
        definition_from_fields(Definition(), path, base_from_request)


@pytest.mark.parametrize(
    "base", ["file:///etc/passwd", "http://x/y", "a b", "a/b/c/d", "@sha256:1"]
)
def test_a_text_that_names_no_model_is_refused(base):
    with pytest.raises(RequestError):
        base_from_request(base)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("FROM a\nPARAMETER colour red", 'line 2: option "colour" is not known'),
        ("FROM a\nPARAMETER temprature 1", "not known; did you mean temperature?"),
        ("FROM a\nPARAMETER top_k many", 'line 2: option "top_k" must be of type integer'),
        ("FROM a\nPARAMETER top_p 3", 'line 2: option "top_p" is 3'),
        ("FROM a\nPARAMETER mirostat two", 'line 2: option "mirostat" must be of type'),
        ("FROM a\nTEMPLATE {{ .Color }}", "line 2: template error: line 1: the field .Color"),
        ("FROM a\nTEMPLATE {% for %}", "line 2: template error: "),
        ("FROM a\nFROM b", "FROM must name one model"),
        (f"FROM a\nFROM @{BLOB}", "FROM must name one model"),
    ],
)
def test_an_error_names_the_line_of_the_modelfile(text, reported):
    with pytest.raises(RequestError) as caught:
        read(text)
    assert reported in str(caught.value)


def test_the_fields_of_a_request_become_a_definition():
    stated = Definition(
        parameters={"top_k": 3, "seed": None},
        system="Be brief.",
        messages=(Message("user", "hi"),),
        licenses=("", "MIT"),
        template="",
    )
    assert definition_from_fields(stated, "tiny:7b", base_from_request) == Definition(
        base=RegistrySource(ModelName.parse("tiny:7b")),
        parameters={"top_k": 3},
        system="Be brief.",
        messages=(Message("user", "hi"),),
        licenses=("MIT",),
    )


@pytest.mark.parametrize(
    ("base", "stated", "reported"),
    [
        (None, {}, "neither 'from' or 'files' was specified"),
        ("a", {"files": {"m.gguf": BLOB}}, "exclude each other"),
        ("a", {"parameters": {"top_k": "x"}}, 'option "top_k" must be of type integer'),
        ("a", {"template": "{{ .Color }}"}, r"template error: line 1: the field \.Color"),
    ],
)
def test_invalid_fields_are_refused(base, stated, reported):
    with pytest.raises(RequestError, match=reported):
        definition_from_fields(Definition(**stated), base, base_from_request)
