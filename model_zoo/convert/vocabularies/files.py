"""A checkpoint's tokenizer files: model, added tokens and roles."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from model_zoo.convert.configuration import Configuration, optional_json
from runtime.errors import ModelFileError

# More tokens than any vocabulary has, but few enough that a damaged id costs little memory.
MAX_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched before all others. `special`: it is a control token."""

    text: str
    special: bool


class TokenizerFiles:
    """tokenizer.json, tokenizer.model, tokenizer.jsonl, RWKV's vocabulary and their settings files;
    missing ones are empty."""

    WORLD: ClassVar = "rwkv_vocab_v20230424.txt"

    def __init__(self, folder: Path, config: Configuration) -> None:
        self.folder = folder
        self.config = config
        self.json = optional_json(folder / "tokenizer.json")
        self.settings = optional_json(folder / "tokenizer_config.json")
        self.special_map = optional_json(folder / "special_tokens_map.json")
        self.generation = optional_json(folder / "generation_config.json")

    @property
    def model(self) -> Mapping[str, Any]:
        model = self.json.get("model")
        return model if isinstance(model, Mapping) else {}

    @property
    def sentencepiece(self) -> Path | None:
        path = self.folder / "tokenizer.model"
        return path if path.exists() else None

    @property
    def token_lines(self) -> Path | None:
        path = self.folder / "tokenizer.jsonl"
        return path if path.exists() else None

    @property
    def world_lines(self) -> Path | None:
        path = self.folder / self.WORLD
        return path if path.exists() else None

    def added_tokens(self) -> dict[int, AddedToken]:
        """Added tokens by id; tokenizer.json has priority over the settings."""
        found: dict[int, AddedToken] = {}
        by_id = self.settings.get("added_tokens_decoder")
        for id, token in (by_id if isinstance(by_id, Mapping) else {}).items():
            number = int(id) if id.isdecimal() else None
            found[self.checked_id("tokenizer_config.json", number)] = self._added(token)
        for token in listed(self.json.get("added_tokens")):
            id = token.get("id") if isinstance(token, Mapping) else None
            found[self.checked_id("tokenizer.json", id)] = self._added(token)
        for text, id in optional_json(self.folder / "added_tokens.json").items():
            token = AddedToken(text, text in self._role_texts())
            found.setdefault(self.checked_id("added_tokens.json", id), token)
        return found

    def checked_id(self, file: str, id: Any) -> int:
        if not isinstance(id, int) or not 0 <= id < MAX_TOKENS:
            raise self.error(file, f"has {str(id)[:40]!r} as the id of a token")
        return id

    def role_text(self, role: str) -> str | None:
        """The text of `bos_token` or another role, as the settings state it."""
        for values in (self.settings, self.special_map):
            value = values.get(role)
            value = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(value, str):
                return value
        return None

    def error(self, file: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.folder / file}: {problem}.")

    def _added(self, token: Any) -> AddedToken:
        if not isinstance(token, Mapping) or not isinstance(token.get("content"), str):
            raise self.error("tokenizer_config.json", "has an added token without a text")
        return AddedToken(token["content"], bool(token.get("special")))

    def _role_texts(self) -> set[str | None]:
        return {self.role_text(f"{role}_token") for role in ("bos", "eos", "unk", "pad")}


def parts(value: Any, key: str) -> list[Mapping[str, Any]]:
    """The steps of a component of tokenizer.json, such as the normalizer, as a flat list.

    `key`: the key under which a `Sequence` has its steps.
    """
    if not isinstance(value, Mapping):
        return []
    if value.get("type") != "Sequence":
        return [value]
    return [step for inner in listed(value.get(key)) for step in parts(inner, key)]


def listed(value: Any) -> list[Any]:
    """A JSON list; empty for any other value."""
    return value if isinstance(value, list) else []
