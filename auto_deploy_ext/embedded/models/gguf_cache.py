"""GGUF files as Hugging Face directories: dequantised once by transformers, kept in the user's cache directory."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

CACHE_VARIABLE = "AUTO_DEPLOY_EXT_CACHE"
"""The environment variable that names another cache directory."""

_MAGIC = b"GGUF"
_FORM = 1
"""Of what `_convert` writes: raise it when that changes, and older copies are made anew."""


class GGUFError(ValueError):
    """A GGUF file that cannot be turned into a Hugging Face directory."""


def cache_directory() -> Path:
    """Where copies are kept: what `CACHE_VARIABLE` names, else the platform's place for a user's caches."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "auto_deploy_ext"


def dequantised(path: Path) -> Path:
    """The directory of a GGUF file's config, float32 weights and tokenizer; made if it is not in the cache yet.

    The directory's name holds a digest of the file's contents and the version of transformers. It appears under that
    name complete or not at all, also when several processes make it at once.

    Args:
        path: A GGUF file of an architecture that transformers reads.

    Raises:
        GGUFError: No GGUF file, an unknown architecture, a damaged file, or package gguf is missing.
        OSError: The cache cannot be written.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise GGUFError(f"{path} is not a GGUF file; give one, or a directory with a config.json")
        file.seek(0)
        digest = _digest(file)
    name = f"{path.stem}-{digest[:16]}-transformers{transformers.__version__}-{_FORM}"
    directory = cache_directory() / "gguf" / name
    if directory.is_dir():
        return directory
    with _writing():
        directory.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", dir=directory.parent))
    try:
        _convert(path, scratch)
        with _writing():
            scratch.chmod(0o755)
            _move_into_place(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def _digest(file: BinaryIO) -> str:
    digest = hashlib.sha256()  # hashlib.file_digest came with Python 3.11
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


@contextmanager
def _writing() -> Iterator[None]:
    """Say what may be done where the cache cannot be written; for a full disk, safetensors has an error of its own.

    Raises:
        OSError: It cannot.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(f"the cache cannot be written: {error}; set {CACHE_VARIABLE} to another place") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file in whatever its readers, and the model of its config, raise.

    Raises:
        GGUFError: It cannot be read.
    """
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    try:
        yield
    except (ValueError, NotImplementedError) as error:
        if "architecture" not in str(error):
            raise GGUFError(f"{path} cannot be read: {error}") from error
        known = ", ".join(sorted(GGUF_SUPPORTED_ARCHITECTURES))
        raise GGUFError(f"{path}: {error} Transformers reads {known}") from error
    except (KeyError, IndexError) as error:
        raise GGUFError(f"{path} is damaged, or lacks a field that every model has: {error}") from error


def _move_into_place(scratch: Path, directory: Path) -> None:
    try:
        scratch.rename(directory)
    except OSError:
        if not directory.is_dir():  # not somebody else, who was faster
            raise


def _convert(path: Path, directory: Path) -> None:
    """Write config, weights and, if the file has one, the tokenizer.

    `AutoModelForCausalLM.from_pretrained(gguf_file=)` does the same and needs accelerate for it.
    """
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise GGUFError(f"{path} needs package gguf: pip install 'auto_deploy_ext[gguf]'") from error
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with _reading(path):
        parsed = load_gguf_checkpoint(str(path))
        config = AutoConfig.for_model(**parsed["config"])
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
        tokenizer: Any = None
        if parsed["tokenizer"].get("tokens"):
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    weights = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with _writing():
        config.save_pretrained(directory)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
