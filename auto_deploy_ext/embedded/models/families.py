"""What is particular about each kind of target and drafter: how it is made exportable, built and initialised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from .custom.modeling_eagle3 import (
    EAGLE3_DERIVED,
    EAGLE3_FIELDS,
    Eagle3Drafter,
    Eagle3Options,
    derive_eagle3,
    eagle3_weight_name,
    initialise_eagle3,
)
from .custom.modeling_hybrid import initialise_hybrid, use_source_ops
from .custom.modeling_llama import initialise_llama
from .custom.modeling_mtp import MTPDrafter, initialise_mtp


@dataclass(frozen=True)
class TargetFamily:
    """One `model_type` of transformers.

    Attributes:
        initialise: Fills a model, on the CPU, with weights from a seed.
        prepare: Makes it exportable, beyond the registered attention implementation.
    """

    initialise: Callable[[Any, int], None]
    prepare: Callable[[nn.Module], Any] | None = None


@dataclass(frozen=True)
class DrafterFamily:
    """One `decoding_type`.

    Attributes:
        build: Makes a drafter from its config and the target's.
        initialise: Fills it, on the CPU, for a target that is initialised already, from a seed.
        capture: Gives the target's layers whose output the drafter reads, from how many there are.
        config_defaults: Fields of its config that differ from the target's.
        load_config_defaults: Gives further ones from the names of the weights in its checkpoint.
        weight_name: From a weight's name in a checkpoint to the drafter's.
        derive: Fills, after loading, what a checkpoint may leave out, from the drafter, the target and the names of
            the weights in the checkpoint.
        derived: The names of all that `derive` can fill.
        further_fields: Fields of its config that the target's type does not have.
    """

    build: Callable[[Any, Any], nn.Module]
    initialise: Callable[[Any, PreTrainedModel, int], None]
    capture: Callable[[int], tuple[int, ...]]
    config_defaults: dict[str, Any]
    load_config_defaults: Callable[[set[str]], dict[str, Any]]
    weight_name: Callable[[str], str] = str
    derive: Callable[[Any, Any, set[str]], None] = lambda drafter, target, names: None
    derived: tuple[str, ...] = ()
    further_fields: tuple[str, ...] = ()


def _build_eagle3(config: LlamaConfig, target: LlamaConfig) -> nn.Module:
    return Eagle3Drafter(config, Eagle3Options.from_config(config, target))


def _eagle3_layers(num_layers: int) -> tuple[int, ...]:
    """The layers that Eagle3 takes of a deep target: an early, the middle and a late one; a shallow one's spread."""
    if num_layers >= 8:
        return 1, num_layers // 2 - 1, num_layers - 4
    return 0, num_layers // 2, num_layers - 1


TARGET_FAMILIES: dict[str, TargetFamily] = {
    "llama": TargetFamily(initialise_llama),
    "bamba": TargetFamily(initialise_hybrid, prepare=use_source_ops),
}
"""By `model_type`; any other is built as it is and initialised as transformers does."""

DRAFTER_FAMILIES: dict[str, DrafterFamily] = {
    "Eagle3": DrafterFamily(
        build=_build_eagle3,
        initialise=initialise_eagle3,
        capture=_eagle3_layers,
        config_defaults={"num_hidden_layers": 1},
        load_config_defaults=lambda names: {
            "own_embedding": "embed_tokens.weight" in names,
            "own_lm_head": "lm_head.weight" in names,
        },
        weight_name=eagle3_weight_name,
        derive=derive_eagle3,
        derived=EAGLE3_DERIVED,
        further_fields=EAGLE3_FIELDS,
    ),
    "MTP": DrafterFamily(
        build=lambda config, target: MTPDrafter(config),
        initialise=lambda drafter, target, seed: initialise_mtp(drafter, seed),
        capture=lambda num_layers: (num_layers - 1,),
        config_defaults={},
        load_config_defaults=lambda names: {},
    ),
}
"""By `speculative_config.decoding_type`."""
