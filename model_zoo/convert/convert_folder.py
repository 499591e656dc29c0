"""Converts a `transformers` folder to GGUF: metadata, tokenizer, chat template and tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from model_zoo.convert import decoders
from model_zoo.convert.checkpoint_reader import Checkpoint, open_checkpoint
from model_zoo.convert.configuration import Configuration
from model_zoo.convert.gguf_metadata import (
    fields_of,
    full_name,
    metadata_of,
    projector_metadata,
    table_keys,
)
from model_zoo.convert.mapping import (
    EMBEDDING,
    FLAVOURS,
    LLAMA_CPP,
    OLLAMA,
    Conversion,
)
from model_zoo.convert.plan import Target, gathered_numbers, plan
from model_zoo.convert.quantization_methods import stored_forms
from model_zoo.convert.quantizers.rows import quantize, row_groups
from model_zoo.convert.recipes import Facts, facts_of_names, file_type, recipe_named, tensor_type
from model_zoo.convert.tables import tables_by_model_type, text_tables, vision_tables
from model_zoo.convert.writer import GGUFOutput, MetadataField, PlannedTensor, gguf_output
from runtime.errors import ConfigurationError, UnsupportedModelError

Progress = Callable[[int, int], None]
_SLAB_ELEMENTS = 1 << 24
_MAGIC = b"GGUF"


def convert(
    folder: Path,
    out: Path,
    *,
    type: str | None = None,
    flavour: str | None = None,
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """Converts the model in `folder` to `out`; returns the paths of all files.

    In llama.cpp's flavour a vision model goes to a second file, named `mmproj-` and the name of
    `out`. At most one stored tensor is in memory. Files get their final names when complete; none
    remains after an error. Raises ConfigurationError for invalid arguments, ModelFileError for an
    invalid folder.

    type: a recipe; None: the stored 16-bit type, F16 for wider ones, and in llama.cpp's flavour the
    blocks of quantised weights, if GGUF has them. flavour: whose key and tensor names to use; None:
    llama.cpp's if it has the architecture. progress(done, total): gets the bytes written.
    """
    _check_request(folder, out, type, flavour)
    config = Configuration.read(folder)
    flavour = flavour or conversion_for(config).flavours[0]
    with open_checkpoint(folder, forms=stored_forms(config)) as checkpoint:
        files = _files(config, checkpoint, out, type, flavour)
        total = sum(tensor.nbytes for file in files for tensor in file.planned)
        with ExitStack() as stack:
            outputs = [
                stack.enter_context(gguf_output(file.path, file.metadata, file.planned))
                for file in files
            ]
            done = 0
            for file, output in zip(files, outputs, strict=True):
                for count in _written(output, file):
                    done += count
                    if progress is not None:
                        progress(done, total)
    return tuple(file.path for file in files)


@dataclass(frozen=True, slots=True)
class _File:
    """A file to write."""

    path: Path
    metadata: Mapping[str, MetadataField]
    targets: Sequence[Target]
    planned: Sequence[PlannedTensor]


def _files(
    config: Configuration, checkpoint: Checkpoint, out: Path, recipe: str | None, flavour: str
) -> list[_File]:
    """The file to write, and in llama.cpp's flavour the file of the vision model, if any."""
    type = recipe or ("bf16" if checkpoint.wide_exponents else "f16")
    conversion, config = _checked(conversion_for(config), config, flavour)
    vision, config_of_vision = vision_of(config)
    keep = recipe is None and flavour == LLAMA_CPP
    targets = plan(conversion, config, checkpoint, flavour=flavour, keep_blocks=keep)
    rows = next(target.shape[0] for target in targets if target.name == EMBEDDING)
    metadata = metadata_of(conversion, config, flavour=flavour, recipe=type, rows=rows)
    if keep:
        kind = file_type(type, kept=[target.blocks for target in targets])
        metadata = {**metadata, **fields_of({"general.file_type": kind}, checkpoint.folder)}
    architecture = conversion.architecture_for(flavour, config)
    gathered = gathered_numbers(conversion, config, checkpoint).items()
    own_keys = {full_name(architecture, name): value for name, value in gathered}
    metadata = {**metadata, **fields_of(own_keys, checkpoint.folder)}
    files = []
    if vision is not None:
        vision, config_of_vision = _checked(vision, config_of_vision, flavour)
        vision_targets = plan(vision, config_of_vision, checkpoint, flavour=flavour)
        if flavour == OLLAMA:
            keys = table_keys(vision, config_of_vision, flavour=flavour)
            metadata = {**metadata, **fields_of(keys, checkpoint.folder)}
            targets = [*targets, *vision_targets]
        else:
            own = projector_metadata(vision, config_of_vision, flavour=flavour, recipe=type)
            planned = _planned(vision_targets, type, config)
            files.append(_File(_beside(out), own, vision_targets, planned))
    return [_File(out, metadata, targets, _planned(targets, type, config)), *files]


def _checked(
    conversion: Conversion, config: Configuration, flavour: str
) -> tuple[Conversion, Configuration]:
    """The table, and the settings with the family's defaults; unsupported settings are refused."""
    config = config.of_family(defaults=conversion.defaults, spellings=conversion.spellings)
    for check in (conversion.check, conversion.checks.get(flavour)):
        if check is not None:
            config.check(check)
    return conversion, config


def conversion_for(config: Configuration) -> Conversion:
    """The table for the checkpoint; UnsupportedModelError if there is none."""
    for name in config.architectures:
        table = text_tables().get(name)
        if table is not None:
            others = _text_type(config) in table.text_types_of_others
            return _of_text_part(config) if others else table
    if any(name in vision_tables() for name in config.architectures):
        return _of_text_part(config)
    stated = ", ".join(config.architectures) or "none"
    raise UnsupportedModelError(
        f"{config.path}: the architecture ({stated}) cannot be converted; "
        f"{', '.join(sorted({*text_tables(), *vision_tables()}))} can."
    )


def _text_type(config: Configuration) -> str | None:
    text = config.whole.get("text_config")
    return text.get("model_type") if isinstance(text, Mapping) else None


def _of_text_part(config: Configuration) -> Conversion:
    """The table for the text model in a checkpoint that combines it with a vision model."""
    kind = config.of_part("text_config").get("model_type")
    table = tables_by_model_type().get(kind)
    if table is None:
        known = ", ".join(sorted(tables_by_model_type()))
        raise UnsupportedModelError(
            f"{config.path}: its text model is of type {kind}; {known} are known."
        )
    drop = (*table.drop, *decoders.OTHER_PARTS, "connector.**", "image_newline")
    return replace(
        table,
        roots=("model.text_model.", *table.roots),
        drop=drop,
        defaults={**table.nested.get(kind, {}), **table.defaults},
    )


def vision_of(config: Configuration) -> tuple[Conversion | None, Configuration]:
    """The table for the vision model, if the checkpoint has one, and its settings.

    `config`: with the defaults of the text model.
    """
    no_vision = "vision_config" in config.whole and config.whole["vision_config"] is None
    for name in () if no_vision else config.architectures:
        if name in vision_tables():
            table = vision_tables()[name]
            return table, config.of_part(*table.part)
    return None, config


def _check_request(folder: Path, out: Path, type: str | None, flavour: str | None) -> None:
    if type is not None:
        recipe_named(type)
    if flavour not in (None, *FLAVOURS):
        raise ConfigurationError(
            f"The flavour {flavour} is not known; known are {', '.join(FLAVOURS)}."
        )
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder} is not a folder; give the folder with the model's config.json."
        )
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigurationError(f"{out} is not a valid file; name one in an existing folder.")
    for path in (out, _beside(out)):
        if path.parent.resolve().is_relative_to(folder.resolve()) and _is_other_file(path):
            raise ConfigurationError(f"{path}: is a file of the checkpoint; choose another name.")


def _is_other_file(path: Path) -> bool:
    """Whether it exists and is no GGUF file, which an earlier conversion may have written."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) != _MAGIC
    except OSError:
        return path.exists()


def _beside(out: Path) -> Path:
    """The path of the vision model's file."""
    return out.with_name(f"mmproj-{out.name}")


def _planned(
    targets: Sequence[Target], type: str, config: Configuration
) -> Sequence[PlannedTensor]:
    names = [target.name for target in targets]
    facts = config.derived("num_key_value_heads", lambda c: _facts(c, names))
    return [PlannedTensor(t.name, t.shape, _type_of(t, type, facts)) for t in targets]


def _facts(config: Configuration, names: Sequence[str]) -> Facts:
    heads = config.get("num_attention_heads", 1)
    return facts_of_names(
        names,
        layers=config.layers,
        experts=int(config.get("num_local_experts") or config.get("num_experts") or 0),
        kv_sharing=heads // (config.get("num_key_value_heads") or heads),
    )


def _type_of(target: Target, recipe: str, facts: Facts) -> str:
    if target.blocks is not None:
        return target.blocks
    return "F32" if target.keep else tensor_type(recipe, target.name, target.shape, facts)


def _written(output: GGUFOutput, file: _File) -> Iterator[int]:
    """Writes all tensors in small groups of rows; yields the number of bytes of each."""
    for target, tensor in zip(file.targets, file.planned, strict=True):
        for read in target.pieces:
            for slab in row_groups(read(), most_elements=_SLAB_ELEMENTS):
                data = slab
                if target.blocks is None:
                    data = quantize(slab.float(), tensor.type, tensor=tensor.name)
                output.append(tensor.name, data)
                yield data.numel()
