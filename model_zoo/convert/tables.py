"""Finds the conversion tables of all families in `model_zoo/models`."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pkgutil import walk_packages

from model_zoo import models
from model_zoo.convert.mapping import Conversion


@cache
def text_tables() -> Mapping[str, Conversion]:
    """Tables for text models, by the names in the `architectures` of config.json."""
    return _by_name((name, table) for table in _tables("checkpoint") for name in table.serves)


@cache
def vision_tables() -> Mapping[str, Conversion]:
    """Tables for vision models, by the names in the `architectures` of config.json."""
    modules = "vision_checkpoint", "vision_next_checkpoint"
    return _by_name((name, table) for table in _tables(*modules) for name in table.serves)


@cache
def tables_by_model_type() -> Mapping[str, Conversion]:
    """Tables for the text models of multimodal checkpoints, by their `model_type`."""
    return _by_name((name, table) for table in _tables("checkpoint") for name in table.model_types)


def _by_name(named: Iterable[tuple[str, Conversion]]) -> Mapping[str, Conversion]:
    tables: dict[str, Conversion] = {}
    for name, table in named:
        first = tables.setdefault(name, table)
        assert first is table, f"two tables are named {name}"
    return tables


def _tables(*modules: str) -> Iterator[Conversion]:
    for found in walk_packages(models.__path__, f"{models.__name__}."):
        if found.name.rpartition(".")[2] in modules:
            for value in vars(import_module(found.name)).values():
                if isinstance(value, Conversion):
                    yield value
