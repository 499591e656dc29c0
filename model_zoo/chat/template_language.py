"""Which language a chat template is in: Jinja, as model files have it, or Go's, as Ollama's do."""

import re

from model_zoo.chat.template import Template
from runtime.errors import ModelFileError, RequestError

# What an action of Go's begins with and no expression of Jinja does.
_GO = re.compile(
    r"\{\{-?\s*(?:"
    r"[.$](?![0-9])|/\*|if\s|with\s|else\b|end\s*-?\}\}|(?:break|continue)\s*-?\}\}"
    r'|range\s+[.$(]|(?:define|block|template)\s+["`]|(?:and|or|not|eq|ne|lt|le|gt|ge|len)\s+[.$(]'
    r")"
)


def is_go_template(source: str) -> bool:
    return _GO.search(source) is not None


def check_jinja(source: str) -> None:
    """RequestError unless it is a template that can be rendered here."""
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
