"""A folder of safetensors becomes a GGUF file: metadata, tokenizer and template, every tensor."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from torch import Tensor

from model_zoo.conversion.checkpoint import open_checkpoint
from model_zoo.conversion.configuration import Configuration
from model_zoo.conversion.mapping import EMBEDDING, FLAVOURS, LLAMA_CPP, OUTPUT, Conversion
from model_zoo.conversion.metadata import metadata_of
from model_zoo.conversion.plan import Target, plan
from model_zoo.conversion.quantizers.rows import quantize
from model_zoo.conversion.recipes import Facts, recipe_named, tensor_type
from model_zoo.conversion.writer import GGUFOutput, PlannedTensor, gguf_output
from model_zoo.registry import CONVERSIONS
from runtime.errors import ConfigurationError, UnsupportedModelError

Progress = Callable[[int, int], None]
_SLAB_ELEMENTS = 1 << 24


def convert(
    folder: Path,
    out: Path,
    *,
    type: str = "f16",
    flavour: str = LLAMA_CPP,
    split_bytes: int | None = None,
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """Write the model of a `transformers` folder to `out`; returns the files, several if split.

    `type`: one of the recipes; `flavour`: whose names the file has. `split_bytes`: the most that
    the tensors of a part take. `progress(done, total)` hears of bytes written. Besides the bytes of
    one stored tensor little memory is used. Files get their names once they are whole; after an
    error none is left. ConfigurationError for what was asked, ModelFileError for the folder.
    """
    _check_request(folder, out, type, flavour)
    config = Configuration.read(folder)
    conversion = conversion_for(config)
    config = config.of_family(defaults=conversion.defaults, spellings=conversion.spellings)
    if conversion.check is not None:
        conversion.check(config)
    with open_checkpoint(folder) as checkpoint:
        targets = plan(conversion, config, checkpoint, flavour=flavour)
        rows = next(target.shape[0] for target in targets if target.name == EMBEDDING)
        metadata = metadata_of(conversion, config, flavour=flavour, recipe=type, rows=rows)
        planned = _planned(targets, type, config)
        with gguf_output(out, metadata, planned, split_bytes=split_bytes) as output:
            for done in _written(output, targets, planned):
                if progress is not None:
                    progress(done, sum(tensor.nbytes for tensor in planned))
    return output.paths


def conversion_for(config: Configuration) -> Conversion:
    """The table that serves the checkpoint; UnsupportedModelError names those that there are."""
    _refuse_quantised(config)
    for name in config.architectures:
        if name in CONVERSIONS:
            module, _, attribute = CONVERSIONS[name].partition(":")
            conversion: Conversion = getattr(import_module(module), attribute)
            assert name in conversion.serves, name
            return conversion
    stated = ", ".join(config.architectures) or "none"
    raise UnsupportedModelError(
        f"{config.path}: the architecture ({stated}) cannot be converted; "
        f"{', '.join(sorted(CONVERSIONS))} can."
    )


def _check_request(folder: Path, out: Path, type: str, flavour: str) -> None:
    recipe_named(type)
    if flavour not in FLAVOURS:
        raise ConfigurationError(
            f"The flavour {flavour} is not known; known are {', '.join(FLAVOURS)}."
        )
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder} is no folder; a model is converted from the folder with its config.json."
        )
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigurationError(f"{out} is no place for a file; name one in a folder that exists.")


def _refuse_quantised(config: Configuration) -> None:
    """Blocks of MXFP4 are the one way in which published models are stored that files know."""
    stated = config.get("quantization_config")
    method = stated.get("quant_method") if isinstance(stated, Mapping) else None
    if method not in (None, "mxfp4"):
        raise UnsupportedModelError(
            f"{config.path}: its weights are quantised ({method}); take the checkpoint that they "
            "were made from."
        )


def _planned(
    targets: Sequence[Target], type: str, config: Configuration
) -> Sequence[PlannedTensor]:
    heads = config.get("num_attention_heads", 1)
    facts = Facts(
        layers=config.layers,
        experts=config.get("num_local_experts") or config.get("num_experts") or 0,
        kv_sharing=heads // (config.get("num_key_value_heads") or heads),
        tied=not any(target.name == OUTPUT for target in targets),
    )
    return [PlannedTensor(t.name, t.shape, _type_of(t, type, facts)) for t in targets]


def _type_of(target: Target, recipe: str, facts: Facts) -> str:
    if target.blocks is not None:
        return target.blocks
    return "F32" if target.keep else tensor_type(recipe, target.name, target.shape, facts)


def _written(
    output: GGUFOutput, targets: Sequence[Target], planned: Sequence[PlannedTensor]
) -> Iterator[int]:
    """Writes all tensors, a piece and a slab of it at a time; yields the bytes written so far."""
    done = 0
    for target, tensor in zip(targets, planned, strict=True):
        for read in target.pieces:
            for slab in _slabs(read()):
                data = slab
                if target.blocks is None:
                    data = quantize(slab.float(), tensor.type, tensor=tensor.name)
                output.append(tensor.name, data)
                done += data.numel()
                yield done


def _slabs(piece: Tensor) -> Iterator[Tensor]:
    """The rows [..., in] of a piece in groups that are small beside a large tensor."""
    rows = piece.reshape(-1, piece.shape[-1])
    step = max(_SLAB_ELEMENTS // rows.shape[1], 1)
    yield from rows.split(step)
