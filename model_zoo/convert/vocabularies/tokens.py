"""The token table of a file: texts, types and scores by id, without gaps."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from model_zoo.convert.vocabularies.files import AddedToken
from model_zoo.tokenizers.vocabulary import TokenType

# Text of unused tokens, in the form that readers recognise.
_FILLING = "[PAD{}]"


@dataclass
class TokenTable:
    """Texts and types by id, and `scores` for kinds of tokenizers with scores."""

    texts: list[str] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    scores: list[float] | None = None

    def put(self, id: int, text: str, type: TokenType, score: float = 0.0) -> None:
        self.fill(id + 1)
        self.texts[id], self.types[id] = text, int(type)
        if self.scores is not None:
            self.scores[id] = score

    def fill(self, size: int) -> None:
        """Adds unused tokens up to `size`."""
        for id in range(len(self.texts), size):
            self.texts.append(_FILLING.format(id))
            self.types.append(int(TokenType.UNUSED))
            if self.scores is not None:
                self.scores.append(-1000.0)

    def cut(self, size: int) -> None:
        """Removes tokens beyond `size`, which have no row in the embedding."""
        del self.texts[size:], self.types[size:]
        if self.scores is not None:
            del self.scores[size:]

    def add(self, added: Mapping[int, AddedToken]) -> None:
        for id, token in added.items():
            kind = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
            unknown = id < len(self.types) and self.types[id] == TokenType.UNKNOWN
            score = self.scores[id] if self.scores is not None and id < len(self.scores) else 0.0
            self.put(id, token.text, TokenType.UNKNOWN if unknown else kind, score)
