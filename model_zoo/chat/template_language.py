"""Templates in Jinja, as in model files, and in the language of Go, as in Ollama's Modelfiles."""

import re

from model_zoo.chat.go_templates.converter import jinja_source
from model_zoo.chat.template import MAX_SOURCE_CHARACTERS, Template
from runtime.errors import ModelFileError, RequestError

# Beginnings of Go actions with which no Jinja expression begins.
_GO = re.compile(
    r"\{\{-?\s*(?:"
    r"[.$](?![0-9])|/\*|if\s|with\s|else\b|end\s*-?\}\}|(?:break|continue)\s*-?\}\}"
    r'|range\s+[.$(]|(?:define|block|template)\s+["`]|(?:and|or|not|eq|ne|lt|le|gt|ge|len)\s+[.$(]'
    r")"
)


def is_go_template(source: str) -> bool:
    return _GO.search(source) is not None


def as_jinja(source: str) -> str:
    """The template in Jinja. ModelFileError if it is a Go template that cannot be converted."""
    if len(source) > MAX_SOURCE_CHARACTERS or not is_go_template(source):
        return source
    return jinja_source(source)


def check_template(source: str) -> None:
    """Raises RequestError unless the source is a template that can be converted and compiled."""
    try:
        Template(as_jinja(source))
    except ModelFileError as error:
        raise RequestError(f"template error: {error}") from None
