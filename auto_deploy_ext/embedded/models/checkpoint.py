"""Reads the weights of a local Hugging Face checkpoint directory into the parameters of a model."""

from __future__ import annotations

import difflib
import json
import pickle
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

DERIVED = (".rotary_emb.inv_freq",)
"""Ends of names of what old checkpoints saved although it follows from the config."""


class CheckpointError(ValueError):
    """A checkpoint directory is damaged, or does not fit the model."""


def weight_files(directory: Path) -> list[Path]:
    """The directory's weight files, sorted: safetensors, or else PyTorch's.

    Raises:
        CheckpointError: There is no such directory or it has no weights.
    """
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        files = sorted(directory.glob(pattern))
        if files:
            return files
    what = "has no *.safetensors or pytorch_model*.bin" if directory.is_dir() else "is not a directory"
    raise CheckpointError(f"{directory} {what}; give a local Hugging Face checkpoint directory")


def weight_names(directory: Path) -> set[str]:
    """The names of all weights in the directory."""
    names: set[str] = set()
    for path in weight_files(directory):
        with readable(path):
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    names.update(file.keys())
            else:
                names.update(torch.load(path, map_location="meta", weights_only=True))
    return names


def stored_config(directory: Path) -> dict[str, Any]:
    """What the directory's `config.json` says.

    Raises:
        CheckpointError: It is no JSON mapping.
    """
    path = directory / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; copy the checkpoint again") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} should hold a mapping, it holds a {type(fields).__name__}")
    return fields


@contextmanager
def readable(path: Path, remedy: str = "copy the checkpoint again") -> Iterator[None]:
    """Name the file, and what to do, in what the reader of weights raises.

    Raises:
        CheckpointError: The file is damaged.
    """
    try:
        yield
    except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is damaged or cut short: {reason}; {remedy}") from error


def load_weights(
    model: nn.Module, directory: Path, rename: Callable[[str], str] = str, optional: Collection[str] = ()
) -> int:
    """Copy every weight of a checkpoint into the parameter or buffer of the same name.

    Args:
        model: Its tensors keep their dtype and device.
        directory: A checkpoint directory.
        rename: From a name in the checkpoint to the one in the model.
        optional: Names in the model that the checkpoint may lack.

    Returns:
        How many weights were copied.

    Raises:
        CheckpointError: A weight is unknown to the model, has another shape, or one that the model has is missing.
    """
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    persistent = set(model.state_dict())
    loaded: set[int] = set()
    count = 0
    with torch.no_grad():
        for stored_name, weight in _weights(directory):
            if stored_name.endswith(DERIVED):
                continue
            name = rename(stored_name)
            tensor = state.get(name)
            if tensor is None:
                near = difflib.get_close_matches(name, state, n=1)
                hint = f"; the nearest name in the model is {near[0]!r}" if near else ""
                raise CheckpointError(f"{directory}: weight {name!r} is not in the model{hint}; check model_kwargs")
            if tensor.shape != weight.shape:
                raise CheckpointError(
                    f"{directory}: weight {name!r} is {list(weight.shape)}, the model's is {list(tensor.shape)}; "
                    "check model_kwargs"
                )
            if weight.is_floating_point() and not tensor.is_floating_point():
                raise CheckpointError(
                    f"{directory}: weight {name!r} holds {weight.dtype}, but should hold {tensor.dtype}"
                )
            tensor.copy_(weight)
            loaded.add(id(tensor))
            count += 1
    missing = sorted(
        name
        for name, tensor in state.items()
        if name in persistent and name not in optional and id(tensor) not in loaded
    )
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise CheckpointError(f"{directory}: {len(missing)} weights of the model are missing: {shown}")
    return count


def _weights(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in weight_files(directory):
        if path.suffix == ".safetensors":
            with readable(path):
                file = safe_open(path, framework="pt")
            with file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    yield name, file.get_tensor(name)
        else:
            with readable(path):
                weights = torch.load(path, map_location="cpu", weights_only=True)
            yield from weights.items()
