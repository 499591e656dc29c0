"""Links that give blobs the names of their files, by which the parts of a split file are found."""

import os
import shutil
from collections.abc import Callable, Mapping, Set
from pathlib import Path

from model_zoo.store.file_access import file_errors, manifest_paths, remove_empty_folders
from model_zoo.store.manifest import Manifest, ManifestLayer
from model_zoo.store.model_name import ModelName


class Views:
    """A folder of links for each version of a model, which never change: a process that opens the
    files of a version one after the other does not get those of another one.

    `blob`: the path of a blob by its digest.
    """

    def __init__(self, root: Path, blob: Callable[[str], Path]) -> None:
        self._root = root
        self._blob = blob

    def file(self, name: ModelName, manifest: Manifest, layer: ManifestLayer) -> Path:
        """The path of the layer's file: a link if it has a title, else the blob."""
        if layer.title is None:
            return self._blob(layer.digest)
        return self._root.joinpath(*name.parts, manifest.digest, layer.title)

    def write(self, name: ModelName, manifest: Manifest) -> None:
        """StoreError if a link cannot be written."""
        for layer in manifest.layers:
            if layer.title is None:
                continue
            path = self.file(name, manifest, layer)
            temporary = path.with_name(f".{layer.digest[7:23]}")
            with file_errors("write", path):
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary.unlink(missing_ok=True)
                temporary.symlink_to(os.path.relpath(self._blob(layer.digest), path.parent))
                temporary.replace(path)

    def remove(self, name: ModelName) -> None:
        """Removes the links of all versions of the model. OSError if one cannot be removed."""
        self._keep(self._root.joinpath(*name.parts), set())

    def remove_others(self, versions: Mapping[ModelName, Manifest]) -> None:
        """Removes the links of all versions except these. OSError as of `remove`."""
        kept: dict[tuple[str, ...], set[str]] = {
            name.parts: {manifest.digest} for name, manifest in versions.items()
        }
        for folder in manifest_paths(self._root):  # of a name
            self._keep(folder, kept.get(folder.relative_to(self._root).parts, set()))

    def _keep(self, folder: Path, versions: Set[str]) -> None:
        for path in folder.glob("*"):
            if path.is_symlink() or not path.is_dir():  # not ours
                path.unlink()
            elif path.name not in versions:
                shutil.rmtree(path)
        remove_empty_folders(folder, self._root)
