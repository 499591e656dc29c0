"""The Jinja environment of `transformers` for chat templates: sandbox, filters, functions and tags.

The rendering process limits time, memory and text. This environment is stricter than Jinja's
sandbox so that templates cannot reach Python's internals, and through them data of other requests.
"""

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from types import GeneratorType
from typing import Any

from jinja2 import TemplateError, Undefined, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

from model_zoo.chat.sandbox.go_functions import FUNCTIONS


class OwnList(list[Any]):
    """A list that a template writes itself, and may change, as Kimi K2's does."""


class _Generator(CodeGenerator):
    """Does not fold constants, so that a model whose template has a costly expression loads; only
    conversations that reach the expression fail. Written lists are `OwnList`."""

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("environment.own_list(")
        super().visit_List(node, frame)
        self.write(")")

    def _output_child_to_const(
        self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo
    ) -> str:
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class SandboxEnvironment(ImmutableSandboxedEnvironment):
    """Raises an error for forbidden attributes, which Jinja would treat as undefined."""

    code_generator_class = _Generator
    own_list = OwnList

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[_GenerationTag, loopcontrols],
        )
        self.filters["tojson"] = _to_json
        functions: dict[str, Callable[..., Any]] = {
            "raise_exception": _raise_exception,
            "strftime_now": strftime_at(),
            "dict": _MakeDict(),
            "namespace": _PlainNamespace,
        }
        self.globals.update(functions | FUNCTIONS)
        del self.globals["lipsum"]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        own = type(obj) is OwnList and not attr.startswith("_")
        return own or super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"access to `{attribute}` of a {type(obj).__name__} is not allowed")


def inspected_texts(tree: nodes.Template) -> set[str]:
    """Constant texts that the template compares values with or passes to a string method."""
    places: list[nodes.Node] = []
    places += tree.find_all(nodes.Compare)
    places += (call for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Getattr))
    constants = (constant for place in places for constant in place.find_all(nodes.Const))
    return {text.value for text in constants if isinstance(text.value, str)}


def given_variables(tree: nodes.Template) -> set[str]:
    """Variables that the template reads and never sets."""
    names: dict[str, set[str]] = {"load": set(), "store": set(), "param": set()}
    for node in tree.find_all(nodes.Name):
        names[node.ctx].add(node.name)
    return names["load"] - names["store"] - names["param"]


def names_in(tree: nodes.Template) -> set[str]:
    """Variables, attributes and constant texts that the template reads."""
    variables = (node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
    attributes = (node.attr for node in tree.find_all(nodes.Getattr))
    texts = (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
    return {*variables, *attributes, *texts}


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012  (as the library types it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a model: without HTML escapes, and by default without Unicode escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: Any) -> list[Any]:
    """The results of the filters `map`, `select` and `reject` as lists, which they are in
    llama.cpp; `transformers` refuses them."""
    if isinstance(value, GeneratorType):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_at(now: datetime | None = None) -> Callable[[str], str]:
    """The function `strftime_now` of templates; `now` is by default the local time."""

    def strftime_now(pattern: str) -> str:
        return (now or datetime.now()).strftime(pattern)

    return strftime_now


class _MakeDict:
    """`dict` without the attributes of a Python type."""

    def __call__(self, *pairs: Any, **named: Any) -> dict[Any, Any]:
        return dict(*pairs, **named)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _PlainNamespace(Namespace):
    """A namespace that refuses names such as `__class__`, which would make Jinja mistake its
    type."""

    def __init__(*args: Any, **named: Any) -> None:  # a name may be `self`
        given = dict(*args[1:], **named)
        for name in given:
            _check_name(name)
        Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the name `{name[:80]}` in a namespace begins with an underscore")
