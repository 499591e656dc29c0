"""Which files of a Hub repository a source means, by the usual file names."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from model_zoo.sources.reference import HubSource
from runtime.errors import SourceError

# Order of choice without a stated quantisation: good 4-bit types first, then the nearest sizes.
PREFERENCE = tuple(
    "Q4_K_M Q4_K_XL Q4_K_L Q4_K_S Q4_K IQ4_NL IQ4_XS MXFP4 MXFP4_MOE NVFP4 Q4_0 Q4_1 "
    "Q5_K_M Q5_K_XL Q5_K_L Q5_K_S Q5_K Q5_0 Q5_1 Q6_K Q6_K_XL Q6_K_L Q8_0 Q8_K_XL "
    "Q3_K_L Q3_K_XL Q3_K_M IQ3_M Q3_K_S Q3_K IQ3_S IQ3_XS IQ3_XXS BF16 F16 "
    "Q2_K_L Q2_K_XL Q2_K IQ2_M Q2_K_S IQ2_S IQ2_XS IQ2_XXS TQ2_0 TQ1_0 IQ1_M IQ1_S F32".split()
)
PROJECTOR_PREFERENCE = ("F16", "BF16", "Q8_0", "F32")
MAX_NAMES_LISTED = 20

_LABEL = re.compile(
    r"(?:^|[-._/])"
    r"((?:UD-)?(?:I?Q\d(?:_(?:K|S|M|L|XL|XS|XXS|NL|\d))*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|FP?(?:16|32)))"
    r"(?=$|[-._/])",
    re.IGNORECASE,
)
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_NO_MODEL = re.compile(r"(^|[-._])(imatrix|lora|adapter|vocab)([-._]|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; `sha256` in hex, None if the Hub does not know it."""

    path: str
    size: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class _Variant:
    """A model in one quantisation: one file, or the parts of a split one in order."""

    stem: str
    files: tuple[HubFile, ...]

    @property
    def label(self) -> str | None:
        return label_of(self.stem)

    @property
    def folder(self) -> str:
        return str(PurePosixPath(self.stem).parent)


def choose(
    source: HubSource, files: Iterable[HubFile]
) -> tuple[tuple[HubFile, ...], HubFile | None]:
    """The model's files in order, and its projector if there is one.

    SourceError if no model or more than one matches; it lists the candidates.
    """
    listed = [file for file in files if file.path.lower().endswith(".gguf")]
    projectors = [file for file in listed if _is_projector(file.path)]
    if source.file is not None and _is_projector(source.file):
        return (_named_file(source, projectors),), None
    models = [file for file in listed if not _is_projector(file.path)]
    if source.file is not None:
        _named_file(source, models)
        variant = next(v for v in _variants(models) if source.file in {f.path for f in v.files})
    else:
        models = [file for file in models if not _NO_MODEL.search(PurePosixPath(file.path).name)]
        variant = _chosen(source, _variants(models))
    _check_whole(source, variant)
    return variant.files, _projector(variant, projectors)


def label_of(path: str) -> str | None:
    """The quantisation in the name of a file or else its folder: "Q4_K_M", "UD-Q2_K_XL"."""
    found = _LABEL.findall(path.removesuffix(".gguf"))
    return found[-1].upper().replace("FP16", "F16").replace("FP32", "F32") if found else None


def _is_projector(path: str) -> bool:
    return "mmproj" in PurePosixPath(path).name.lower()


def _named_file(source: HubSource, files: Sequence[HubFile]) -> HubFile:
    for file in files:
        if file.path == source.file:
            return file
    raise SourceError(f"{source}: the repository has no such file; it has {_listed(files)}.")


def _variants(files: Iterable[HubFile]) -> list[_Variant]:
    gathered: dict[str, list[HubFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        part = _SPLIT.fullmatch(file.path)
        # Parts with different counts belong to different models; a whole file has no parts.
        key = file.path if part is None else f"{part['stem']}\0{part['count']}"
        gathered.setdefault(key, []).append(file)
    return [_Variant(key.partition("\0")[0], tuple(group)) for key, group in gathered.items()]


def _check_whole(source: HubSource, variant: _Variant) -> None:
    part = _SPLIT.fullmatch(variant.files[0].path)
    if part is None:
        return
    count = int(part["count"])
    wanted = [f"{part['stem']}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]
    present = [file.path for file in variant.files]
    if present != wanted:
        part_name = min(set(wanted) ^ set(present))
        problem = "is missing" if part_name in wanted else "is unexpected"
        raise SourceError(f"{source}: the model has {count:,} parts, and {part_name} {problem}.")


def _chosen(source: HubSource, variants: Sequence[_Variant]) -> _Variant:
    if not variants:
        raise SourceError(
            f"{source}: the repository has no GGUF model; quantised models are usually in separate "
            "repositories with names that end in -GGUF."
        )
    if source.quantization is not None:
        fitting = _with_label(variants, source.quantization)
        if not fitting:
            raise SourceError(
                f"{source}: the repository has no {source.quantization}; it has "
                f"{_labels(variants)}."
            )
        return _single(source, fitting)
    for label in PREFERENCE:
        fitting = _with_label(variants, label)
        if fitting:
            return _single(source, fitting)
    return _single(source, variants)


def _with_label(variants: Sequence[_Variant], label: str) -> list[_Variant]:
    """Variants with exactly this label; if there are none, those with this label after the prefix
    of dynamic quantisation."""
    exact = [variant for variant in variants if variant.label == label]
    return exact or [variant for variant in variants if variant.label == f"UD-{label}"]


def _single(source: HubSource, variants: Sequence[_Variant]) -> _Variant:
    """The single variant; a whole file is preferred to the same model in parts. SourceError if
    several remain."""
    whole = [variant for variant in variants if len(variant.files) == 1] or variants
    if len(whole) > 1:
        raise SourceError(
            f"{source}: several files match, {_listed([v.files[0] for v in whole])}; "
            "name one: hf://org/repo/file.gguf."
        )
    return whole[0]


def _projector(variant: _Variant, projectors: Sequence[HubFile]) -> HubFile | None:
    """Prefers the model's folder, then the model's name, then the precision."""

    def rank(file: HubFile) -> tuple[bool, bool, int, str]:
        beside = str(PurePosixPath(file.path).parent) == variant.folder
        named_alike = _base(file.path) == _base(variant.stem)
        return not beside, not named_alike, _precision(file), file.path

    above = {".", variant.folder, *map(str, PurePosixPath(variant.folder).parents)}
    near = [file for file in projectors if str(PurePosixPath(file.path).parent) in above]
    return min(near, key=rank, default=None)


def _precision(projector: HubFile) -> int:
    label = label_of(projector.path)
    if label not in PROJECTOR_PREFERENCE:
        return len(PROJECTOR_PREFERENCE)
    return PROJECTOR_PREFERENCE.index(label)


def _base(path: str) -> str:
    """A file's name without its quantisation and "mmproj"."""
    name = PurePosixPath(path).name.lower().removesuffix(".gguf")
    return re.sub(r"[-._]+", "-", _LABEL.sub("", name).replace("mmproj", "")).strip("-")


def _labels(variants: Sequence[_Variant]) -> str:
    labels = sorted({variant.label or "files without a label" for variant in variants})
    return ", ".join(labels[:MAX_NAMES_LISTED])


def _listed(files: Sequence[HubFile]) -> str:
    names = ", ".join(file.path for file in files[:MAX_NAMES_LISTED])
    more = f" and {len(files) - MAX_NAMES_LISTED} more" if len(files) > MAX_NAMES_LISTED else ""
    return f"{names}{more}" or "none"
