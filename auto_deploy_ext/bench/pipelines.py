"""Pipelines to measure: one exported model, and for each pipeline a copy with its own caches and compilation."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..embedded.config import EmbeddedConfig, load_config
from ..embedded.models.custom.modeling_eagle import EagleWrapper, EagleWrapperConfig
from ..embedded.models.factory import ModelFactory, ModelFactoryRegistry
from ..embedded.pipeline import make_interface
from ..embedded.shim.interface import CachedSequenceInterface
from ..embedded.transform.optimizer import InferenceOptimizer
from .cells import Backend

_MODEL = ("build_model", "export_to_gm", "load_weights")
_COMPILE = ("compile_model",)
#: what the benchmark does itself, once per policy.
_OWN = ("scope_host_mirrors", "fuse_metadata_mutations", "check_capture")


@dataclass(frozen=True)
class Limits:
    """Sizes of a pipeline where the config's own are not to hold.

    Attributes:
        max_batch_size: rows of the largest batch.
        max_seq_len: tokens of the longest sequence.
        max_cached_tokens: tokens that the paged caches have room for; None: what full batches of the longest need.
    """

    max_batch_size: int
    max_seq_len: int
    max_cached_tokens: int | None = None


class ModelSource:
    """Builds the pipelines of a config.

    Args:
        name_or_path: the config.
        overrides: as `load_config` takes them.
        capture: what becomes a device graph with torch-cudagraph: `consumers`, or `segments` of each orchestrator.
    """

    def __init__(
        self, name_or_path: str, overrides: Mapping[str, Any] | None = None, capture: str = "consumers"
    ) -> None:
        self.name = name_or_path
        self.capture = capture
        self._overrides = dict(overrides or {})
        self.config = load_config(name_or_path, overrides=self._overrides)
        self._base: EagleWrapper | None = None

    def config_of(self, backend: Backend, limits: Limits, batch_sizes: Sequence[int]) -> EmbeddedConfig:
        """The config of one pipeline."""
        values: dict[str, Any] = {
            "attn_backend": backend.attention,
            "draft_attn_backend": backend.attention,
            "compile_backend": backend.compiled,
            "speculative_config.max_draft_len": backend.k,
            "max_batch_size": limits.max_batch_size,
            "max_seq_len": limits.max_seq_len,
            "max_num_tokens": max(self.config.max_num_tokens, limits.max_batch_size * (1 + backend.k)),
        }
        if limits.max_cached_tokens is not None:
            values["kv_cache_config.max_tokens"] = limits.max_cached_tokens
        if backend.compiled == "torch-cudagraph":
            values["transforms.compile_model.capture"] = "consumers"
            values["transforms.compile_model.cuda_graph_batch_sizes"] = sorted(batch_sizes)
        return load_config(self.name, overrides=self._overrides | values)

    def base(self) -> EagleWrapper:
        """The exported model on its device; built once.

        Raises:
            ValueError: the config builds no Eagle wrapper.
        """
        if self._base is None:
            wrapper = _run(_factory(self.config), self.config, _MODEL, make_interface(self.config), None)
            if not isinstance(wrapper, EagleWrapper):
                raise ValueError(f"config {self.name!r} has no draft loop: set speculative_config")
            self._base = wrapper
        return self._base

    def build(self, backend: Backend, limits: Limits, batch_sizes: Sequence[int]) -> BenchPipeline:
        """A pipeline up to, and not including, compilation."""
        config = self.config_of(backend, limits, batch_sizes)
        wrapper = _copy_sharing_weights(self.base())
        wrapper.config = EagleWrapperConfig(backend.k)
        wrapper.max_draft_len = backend.k
        factory, cm = _factory(config), make_interface(config)
        between = [key for key in config.transforms if key not in (*_MODEL, *_COMPILE, *_OWN)]
        model = _run(factory, config, between, cm, wrapper)
        assert isinstance(model, EagleWrapper)
        fill_caches(cm)
        sizes = tuple(sorted(batch_sizes)) if backend.compiled == "torch-cudagraph" else ()
        segments = sizes if self.capture == "segments" else ()
        return BenchPipeline(backend, config, factory, model.eval(), cm, segments)


@dataclass
class BenchPipeline:
    """What is measured.

    Attributes:
        backend: what it was built for.
        config: with that backend filled in.
        factory: where the model came from.
        wrapper: target and drafter; captured once `compile` has run.
        cm: the interface.
        segments: batch sizes for which the segments of its orchestrators are captured, rather than consumers.
    """

    backend: Backend
    config: EmbeddedConfig
    factory: ModelFactory
    wrapper: EagleWrapper
    cm: CachedSequenceInterface
    segments: tuple[int, ...] = ()

    def compile(self) -> None:
        """Compile the consumers, in place: every orchestrator over them runs the compiled ones from then on."""
        compiled = _run(self.factory, self.config, _COMPILE, self.cm, self.wrapper)
        if compiled is not self.wrapper:
            raise ValueError(f"{self.config.compile_backend} replaces the wrapper, whose orchestrators are compared")


def fill_caches(cm: CachedSequenceInterface, seed: int = 0) -> None:
    """Put finite noise where a prefill would have left keys, values and states."""
    generator = torch.Generator(device=cm.device).manual_seed(seed)
    for cache in cm.kv_cache_manager.resources.values() if cm.kv_cache_manager is not None else ():
        if cache.is_floating_point():
            cache.normal_(generator=generator)


def _factory(config: EmbeddedConfig) -> ModelFactory:
    return ModelFactoryRegistry.get(config.model_factory).from_config(config)


def _run(
    factory: ModelFactory, config: EmbeddedConfig, keys: Iterable[str], cm: CachedSequenceInterface, model: Any
) -> Any:
    """Run some of a config's transforms."""
    chosen = {key: config.transforms[key] for key in config.transforms if key in set(keys)}
    return InferenceOptimizer(factory, chosen)(cm, model)


def _copy_sharing_weights(wrapper: EagleWrapper) -> EagleWrapper:
    """A wrapper with graphs of its own and the same parameters and buffers."""
    shared: dict[int, Any] = {id(t): t for t in (*wrapper.parameters(), *wrapper.buffers())}
    return copy.deepcopy(wrapper, shared)
