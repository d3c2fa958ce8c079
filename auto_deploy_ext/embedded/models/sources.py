"""Where a checkpoint is: what `model:` and `speculative_model:` may say, resolved to a Hugging Face directory."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ...spelling import suggestion
from . import gguf_cache

PACKAGE_SCHEME = "package://"


class SourceError(ValueError):
    """A checkpoint that is there but cannot be used."""


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint on this machine.

    Attributes:
        spec: What the config says.
        path: What that names: a directory or a GGUF file.
        directory: A directory with config.json, weights and, if the checkpoint has one, the tokenizer. Of a GGUF file
            it is the dequantised copy in the cache, see `gguf_cache`.
    """

    spec: str
    path: Path
    directory: Path


def resolve_source(spec: str, field: str = "model") -> ModelSource:
    """Find a checkpoint; nothing is downloaded. A GGUF file is dequantised into the cache the first time.

    Args:
        spec: A Hugging Face checkpoint directory, a GGUF file, or ``package://NAME/PATH`` for either of them among the
            data of an installed package, which is not imported for that.
        field: The config's field that says so, for messages.

    Raises:
        FileNotFoundError: There is no such package, file or directory, or no config.json in it.
        SourceError: A GGUF file that cannot be read.
    """
    path = locate(spec, field)
    if path.is_file():
        try:
            return ModelSource(spec, path, gguf_cache.dequantised(path))
        except gguf_cache.GGUFError as error:
            raise SourceError(f"{field}: {error}") from error
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"{field}: {spec} has no config.json; give a local Hugging Face checkpoint directory or a GGUF file "
            "(nothing is downloaded), or leave the field out for random weights"
        )
    return ModelSource(spec, path, path)


def locate(spec: str, field: str = "model") -> Path:
    """The file or directory that a spec names.

    Raises:
        FileNotFoundError: It does not exist; the message names a neighbour that was probably meant.
    """
    path = _in_package(spec, field) if spec.startswith(PACKAGE_SCHEME) else Path(spec).expanduser()
    if path.exists():
        return path
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = suggestion(path.name, beside)
    raise FileNotFoundError(
        f"{field}: {spec} does not exist{hint}; give a local Hugging Face checkpoint directory with a config.json or a "
        "GGUF file (nothing is downloaded)"
    )


def _in_package(spec: str, field: str) -> Path:
    name, _, inside = spec.removeprefix(PACKAGE_SCHEME).partition("/")
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError(
            f"{field}: {spec} is in package {name!r}, which is not installed: pip install --no-deps "
            f"{name.replace('_', '-')}"
        )
    places = [Path(root) / PurePosixPath(inside) for root in found.submodule_search_locations]
    return next((place for place in places if place.exists()), places[0])
