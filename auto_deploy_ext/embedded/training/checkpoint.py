"""Writes a head as an Eagle3 checkpoint directory, and keeps what a run needs to go on where it stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ...commands.report import write_text
from ..models.checkpoint import readable, stored_config
from ..models.custom.modeling_eagle3 import Eagle3Drafter, captured_layers
from .corpus import DraftVocabulary

CONFIG_FILE, WEIGHTS_FILE, STATE_FILE = "config.json", "model.safetensors", "state.pt"


@torch.no_grad()
def export(
    directory: Path, drafter: Eagle3Drafter, vocabulary: DraftVocabulary, scale: torch.Tensor, capture: tuple[int, ...]
) -> int:
    """Write `config.json` and `model.safetensors` in bfloat16; embedding and head stay the target's.

    Args:
        directory: Made if missing.
        drafter: Its `fc` takes captured states divided by `scale`, which goes into the written weight.
        vocabulary: Gives `d2t` and `t2d`; a whole vocabulary needs neither.
        scale: float32 [layers * hidden].
        capture: The captured layers.

    Returns:
        Bytes of the weights file.
    """
    weights = {}
    for name, parameter in drafter.named_parameters():
        value = parameter.detach().float()
        if name == "fc.weight":
            value = value / scale
        weights[name] = value.to(torch.bfloat16).cpu().contiguous()
    tokens = vocabulary.tokens.cpu()
    if len(tokens) != len(vocabulary.index):
        weights["d2t"] = tokens - torch.arange(len(tokens))
        weights["t2d"] = (vocabulary.index >= 0).cpu()
    config: dict[str, Any] = drafter.config.to_dict()
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "dtype": "bfloat16",
        "draft_vocab_size": len(tokens),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(capture), "use_aux_hidden_state": True},
    }
    directory.mkdir(parents=True, exist_ok=True)
    scratch = directory / (WEIGHTS_FILE + ".partial")
    save_file(weights, scratch)
    os.replace(scratch, directory / WEIGHTS_FILE)
    write_text(directory / CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True) + "\n")
    return (directory / WEIGHTS_FILE).stat().st_size


def check_layers(directory: Path, capture: tuple[int, ...]) -> None:
    """Compare the layers that a head was trained on, where it names them, with the target's captured ones.

    Raises:
        ValueError: They are others: its weights fit, but mean something else.
    """
    trained = captured_layers(stored_config(directory).get("eagle_config"))
    if trained and sorted(trained) != sorted(capture):
        raise ValueError(
            f"{directory} holds a head that reads layers {trained}, but of the target layers {list(capture)} are "
            "captured: name the head's in speculative_config.eagle3_layers_to_capture of a --config, or train anew"
        )


@torch.no_grad()
def load_weights(directory: Path, drafter: Eagle3Drafter, scale: torch.Tensor) -> None:
    """Give a drafter in training the weights that `export` wrote.

    Args:
        directory: Has `model.safetensors`.
        drafter: Its `fc` takes captured states divided by `scale`.
        scale: float32 [layers * hidden].

    Raises:
        ValueError: The head there has other tensors or sizes.
    """
    path = directory / WEIGHTS_FILE
    with readable(path):
        kept = load_file(path)
    for name, parameter in drafter.named_parameters():
        value = kept.get(name)
        if value is None or value.shape != parameter.shape:
            found = "nothing" if value is None else list(value.shape)
            raise ValueError(f"{directory}: {name} should be {list(parameter.shape)}, there is {found}")
        value = value.to(parameter.device, torch.float32)
        parameter.copy_(value * scale if name == "fc.weight" else value)


def save_state(directory: Path, state: dict[str, Any]) -> None:
    """Keep a run's state; the one before stays until this one is complete."""
    directory.mkdir(parents=True, exist_ok=True)
    scratch = directory / (STATE_FILE + ".partial")
    torch.save(state, scratch)
    os.replace(scratch, directory / STATE_FILE)


def load_state(directory: Path, device: torch.device) -> dict[str, Any] | None:
    """A run's state, or None where there is none.

    Raises:
        CheckpointError: What is there is damaged.
    """
    path = directory / STATE_FILE
    if not path.is_file():
        return None
    with readable(path, "delete it to train again on the text that is kept beside it"):
        return torch.load(path, map_location=device, weights_only=True)
