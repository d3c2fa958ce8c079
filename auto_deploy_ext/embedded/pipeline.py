"""From a config to a model that is ready to generate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .config import ConfigError, EmbeddedConfig
from .models import random_weights  # noqa: F401  (registers its factory)
from .models.factory import ModelFactory, ModelFactoryRegistry
from .shim.interface import CachedSequenceInterface
from .transform.optimizer import InferenceOptimizer
from .yaml_places import Place, Problem


@dataclass(frozen=True)
class Pipeline:
    """What the transforms of a config made.

    Attributes:
        config: what was asked.
        factory: where the model came from.
        model: the transformed model; an `EagleWrapper` when the config speculates.
        cm: the interface with its metadata and caches.
    """

    config: EmbeddedConfig
    factory: ModelFactory
    model: nn.Module
    cm: CachedSequenceInterface


def make_interface(config: EmbeddedConfig) -> CachedSequenceInterface:
    """An interface of the config's limits on its device, without caches yet."""
    return CachedSequenceInterface(
        max_seq_len=config.max_seq_len,
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        device=config.device,
        kv_cache_config=config.kv_cache_config,
        spec_config=config.speculative_config if config.max_draft_len else None,
    )


def build_pipeline(config: EmbeddedConfig) -> Pipeline:
    """Run all transforms of a config.

    A GPU that the config names by its number becomes the process's current one: device graphs are captured and Triton's
    kernels launched on that, so a process runs the models of one GPU.

    Raises:
        ConfigError: no such model factory, or no such device on this machine.

    Example:
        >>> pipeline = build_pipeline(load_config("eagle3_llama"))
        >>> generate(pipeline.model, pipeline.cm, [[1, 2, 3]], max_new_tokens=8)
    """
    try:
        factory_class = ModelFactoryRegistry.get(config.model_factory)
    except KeyError as error:
        raise ConfigError([Problem(Place("config"), "model_factory", str(error.args[0]))]) from error
    use_device(config)
    factory = factory_class.from_config(config)
    cm = make_interface(config)
    model = InferenceOptimizer(factory, config.transforms)(cm)
    if model is None:
        raise ConfigError([Problem(Place("config"), "transforms", "no transform builds a model; enable build_model")])
    return Pipeline(config, factory, model.eval(), cm)


def use_device(config: EmbeddedConfig) -> None:
    """Make a config's GPU the current one of the process, where the config says which.

    Raises:
        ConfigError: it is not there.
    """
    device = config.torch_device
    if device.type != "cuda":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        found = f"GPUs 0 to {count - 1}" if count else "no GPU"
        message = f"{config.device} is asked for, but PyTorch {torch.__version__} finds {found}; set device: cpu"
        raise ConfigError([Problem(Place("config"), "device", message)])
    if device.index is not None:
        torch.cuda.set_device(device)
