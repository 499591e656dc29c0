"""The models that a request may use."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from serve_app.config.settings import canonical_name


@dataclass(frozen=True, slots=True)
class AllowedModels:
    """Name patterns of the models that a request may use; `*` matches any text. None: all."""

    patterns: tuple[str, ...] | None = None

    def __contains__(self, name: str) -> bool:
        if self.patterns is None:
            return True
        name = canonical_name(name)
        return any(fnmatchcase(name, canonical_name(pattern)) for pattern in self.patterns)


ALL_MODELS = AllowedModels()
