"""The tables of keys in configs/README.md are those of the settings."""

import re
from inspect import get_annotations
from typing import Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from serve_app.config.sections import Section
from tools.config_reference import README, SECTIONS, default, meanings, with_tables

each_section = pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)


def test_the_tables_are_up_to_date():
    text = README.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run `python -m tools.config_reference`"


def test_an_outdated_table_is_replaced():
    current = with_tables("a\n<!-- keys of AdapterSettings -->\n<!-- end -->\nz")
    assert "| `scale` | 1 | Factor" in current
    assert with_tables(current.replace("| 1 |", "| 2 |")) == current
    assert current.startswith("a\n") and current.endswith("\nz")


def test_every_section_has_one_table():
    tables = re.findall(r"<!-- keys of (\w+) -->", README.read_text(encoding="utf-8"))
    assert sorted(tables) == sorted(SECTIONS)
    assert set(SECTIONS.values()) == set(subclasses(Section))


def subclasses(section: type[BaseModel]) -> list[type[BaseModel]]:
    return [one for child in section.__subclasses__() for one in (child, *subclasses(child))]


@each_section
def test_every_key_has_a_meaning(section: type[BaseModel]):
    assert list(meanings(section)) == list(get_annotations(section))


@each_section
def test_every_choice_is_named(section: type[BaseModel]):
    for name, meaning in meanings(section).items():
        annotation = section.model_fields[name].annotation
        for choice in get_args(annotation) if get_origin(annotation) is Literal else ():
            assert f"`{choice}`" in meaning


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("max_waiting", "512"),
        ("trace_bytes", "64 MiB"),
        ("trace", "false"),
        ("cache_tokens", "null"),
        ("defaults", "{}"),
        ("device", "auto"),
    ],
)
def test_defaults_are_written_as_in_yaml(key: str, written: str):
    assert default(key, SECTIONS["EngineSettings"].model_fields[key]) == written
