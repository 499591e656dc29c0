"""Running a model file's Jinja template: in a sandbox, as `transformers` does, and bounded."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SecurityError
from jinja2.utils import Namespace

from model_zoo.sandbox.budget import Budget
from model_zoo.sandbox.environment import SandboxEnvironment, render
from runtime.errors import ModelFileError, RequestError

MAX_SOURCE_CHARACTERS = 1 << 17
_MAX_TOLD = 500
_WIDE_DATE = re.compile(r"\d{2}")


def compile_template(source: str) -> Template:
    """The template, ready to render; ModelFileError where it is not Jinja."""
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise ModelFileError(
            f"The file's chat template has {len(source):,} characters; "
            f"{MAX_SOURCE_CHARACTERS:,} is the limit."
        )
    try:
        return _ENVIRONMENT.from_string(source)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        where = f" in line {line}" if line else ""
        raise ModelFileError(f"The file's chat template is broken{where}: {error}.") from error
    except Exception as error:  # Python's compiler has limits of its own
        raise ModelFileError(f"The file's chat template cannot be compiled: {error}.") from error


def render_bounded(
    template: Template, variables: Mapping[str, Any], *, now: datetime | None = None
) -> str:
    """The text; RequestError where the template refuses, fails, or takes more than is allowed.

    `now`: the time that the template is told, by default this machine's.
    """
    clock = {} if now is None else {"strftime_now": strftime_at(now)}
    try:
        return render(template, {**variables, **clock}, Budget(variables))
    except SecurityError as error:
        raise RequestError(f"The chat template is not allowed what it does: {error}.") from error
    except TemplateError as error:
        raise RequestError(f"The chat template refuses the conversation: {_told(error)}") from error
    except Exception as error:  # a template is a program: it can fail in any way
        kind = type(error).__name__
        told = f"{kind}: {_told(error)}"
        raise RequestError(f"The chat template fails on the conversation: {told}") from error


def _told(error: Exception) -> str:
    return str(error)[:_MAX_TOLD]


def inspected_texts(source: str) -> frozenset[str]:
    """The constant texts that the template compares with or hands to a string method."""
    places: list[nodes.Node] = []
    tree = _ENVIRONMENT.parse(source)
    places += tree.find_all(nodes.Compare)
    places += (call for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Getattr))
    constants = (constant for place in places for constant in place.find_all(nodes.Const))
    return frozenset(text.value for text in constants if isinstance(text.value, str))


def names_in(source: str) -> frozenset[str]:
    """Every variable that the template reads, every attribute and every constant text."""
    tree = _ENVIRONMENT.parse(source)
    variables = (node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
    attributes = (node.attr for node in tree.find_all(nodes.Getattr))
    texts = (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
    return frozenset((*variables, *attributes, *texts))


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it changes nothing."""

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
    """JSON for a model to read: no HTML escapes, characters as they are."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_at(now: datetime | None = None) -> Callable[[str], str]:
    """What templates know as `strftime_now`."""

    def strftime_now(pattern: str) -> str:
        if len(pattern) > 200 or _WIDE_DATE.search(pattern):
            raise SecurityError("a date format is too wide")
        return (now or datetime.now()).strftime(pattern)

    return strftime_now


class _MakeDict:
    """`dict` without what else a Python type can do."""

    def __call__(self, *pairs: Any, **named: Any) -> dict[Any, Any]:
        return dict(*pairs, **named)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _PlainNamespace(Namespace):
    """A namespace whose names cannot pass for Python's own."""

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


def _environment() -> SandboxEnvironment:
    environment = SandboxEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.add_filter("tojson", _to_json)
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": strftime_at(),
        "dict": _MakeDict(),
        "namespace": _PlainNamespace,
    }
    environment.globals.update(functions)
    del environment.globals["lipsum"]
    return environment


_ENVIRONMENT = _environment()
