"""Reads the weights of a local Hugging Face checkpoint directory into the parameters of a model."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

DERIVED = (".rotary_emb.inv_freq",)
"""Ends of names of what old checkpoints saved although it follows from the config."""


class CheckpointError(ValueError):
    """A checkpoint directory does not fit the model."""


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
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                names.update(file.keys())
        else:
            names.update(torch.load(path, map_location="meta", weights_only=True))
    return names


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
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    yield name, file.get_tensor(name)
        else:
            yield from torch.load(path, map_location="cpu", weights_only=True).items()
