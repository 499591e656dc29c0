"""Tells Jinja templates, as in model files, from Go templates, as in Ollama's Modelfiles."""

import re

from model_zoo.chat.template import Template
from runtime.errors import ModelFileError, RequestError

# Beginnings of Go actions that no Jinja expression has.
_GO = re.compile(
    r"\{\{-?\s*(?:"
    r"[.$](?![0-9])|/\*|if\s|with\s|else\b|end\s*-?\}\}|(?:break|continue)\s*-?\}\}"
    r'|range\s+[.$(]|(?:define|block|template)\s+["`]|(?:and|or|not|eq|ne|lt|le|gt|ge|len)\s+[.$(]'
    r")"
)


def is_go_template(source: str) -> bool:
    return _GO.search(source) is not None


def check_jinja(source: str) -> None:
    """Raises RequestError unless the source is a Jinja template that compiles."""
    if is_go_template(source):
        raise RequestError(
            "template error: it is in Go's template language, which is not served; write it in "
            "Jinja, as in `tokenizer.chat_template` of model files, or leave it out, and the model "
            "file's own is used."
        )
    try:
        Template(source)
    except ModelFileError as error:
        raise RequestError(f"template error: {error}") from None
