"""Model factories: from a config to a model with its weights, and what of it is to be exported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...spelling import misspelled, suggestion
from ..custom_ops.torch_attention import ATTENTION_IMPLEMENTATION, register_with_transformers
from .checkpoint import load_weights, stored_config, weight_names
from .custom.modeling_eagle import EagleWrapper, EagleWrapperConfig
from .custom.modeling_eagle3 import captured_layers
from .end_tokens import end_token_ids
from .families import DRAFTER_FAMILIES, TARGET_FAMILIES, DrafterFamily, TargetFamily
from .sources import resolve_source

if TYPE_CHECKING:
    from ..config import EmbeddedConfig

EXAMPLE_BATCH, EXAMPLE_SEQUENCE = 2, 5
"""Sizes of the inputs that modules are exported with; different and above 1, so that neither is specialised."""


@dataclass(frozen=True)
class ExportInfo:
    """One submodule to export.

    Attributes:
        path: Its qualified name in the model; empty for the model itself.
        role: "target", "draft" or "model".
        example_inputs: Keyword arguments; their first two dimensions are dynamic.
        kept: Attributes that the result has beside what its graph uses.
    """

    path: str
    role: str
    example_inputs: Mapping[str, torch.Tensor]
    kept: tuple[str, ...] = ()


class ModelFactory(ABC):
    """Where a pipeline's model and weights come from.

    Args:
        model: A checkpoint, as `resolve_source` takes it, or None for random weights.
        model_kwargs: Fields of the model's config.
        speculative_config: `SpeculativeConfig` as a mapping, or None to decode without speculation.
        speculative_model_kwargs: Fields of the drafter's config.
        seed: Of random weights.
        temperature: Of sampling; 0 decodes greedily.
        dtype: Of weights and activations.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        model_kwargs: Mapping[str, Any] | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        speculative_model_kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
        temperature: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.model_kwargs = dict(model_kwargs or {})
        self.speculative_config = dict(speculative_config or {})
        self.speculative_model_kwargs = dict(speculative_model_kwargs or {})
        self.seed = seed
        self.temperature = temperature
        self.dtype = dtype

    @classmethod
    def from_config(cls, config: EmbeddedConfig) -> ModelFactory:
        """Make the factory that the config's fields describe."""
        speculative = config.speculative_config
        return cls(
            config.model,
            model_kwargs=config.model_kwargs,
            speculative_config=None if speculative is None else speculative.model_dump(),
            speculative_model_kwargs=config.speculative_model_kwargs,
            seed=config.seed,
            temperature=config.temperature,
            dtype=config.torch_dtype,
        )

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the model on the CPU, in eval mode; random weights are in place, a checkpoint's are not."""

    @abstractmethod
    def get_export_infos(self, model: nn.Module) -> list[ExportInfo]:
        """What of the model becomes GraphModules."""

    @abstractmethod
    def load_or_random_init(self, model: nn.Module, device: torch.device) -> int:
        """Load the checkpoint, if there is one, and move the model; returns how many weights were loaded.

        Args:
            model: What `build_model` built, exported or not.
            device: Where it is to run.
        """

    @abstractmethod
    def layers_to_capture(self) -> tuple[int, ...]:
        """The target's layers whose output the drafter reads, ascending; empty without speculation."""

    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a continuation; a model with random weights has none."""
        return ()


class ModelFactoryRegistry:
    """Factories by the name that `model_factory:` gives."""

    _registry: ClassVar[dict[str, type[ModelFactory]]] = {}

    @classmethod
    def register(cls, name: str) -> Callable[[type[ModelFactory]], type[ModelFactory]]:
        """Decorate a factory class to make it available under a name."""

        def decorate(factory: type[ModelFactory]) -> type[ModelFactory]:
            cls._registry[name] = factory
            return factory

        return decorate

    @classmethod
    def has(cls, name: str) -> bool:
        """Whether there is a factory of this name."""
        return name in cls._registry

    @classmethod
    def get(cls, name: str) -> type[ModelFactory]:
        """The factory of a name.

        Raises:
            KeyError: There is none; the message names those that exist.
        """
        if name not in cls._registry:
            raise KeyError(f"unknown model_factory {name!r}{_nearest(name, cls._registry)}")
        return cls._registry[name]


def _nearest(name: str, known: Iterable[str]) -> str:
    return suggestion(name, known, otherwise=f"there are {', '.join(sorted(known))}")


def _check_spelling(given: Iterable[str], kind: type[PreTrainedConfig], more: Iterable[str] = ()) -> None:
    """Refuse a field that is nearly one of a kind of config's; the others may be known to the model alone.

    Raises:
        ValueError: there is one.
    """
    message = misspelled(given, {*kind().to_dict(), *kind.attribute_map, *more})
    if message is not None:
        raise ValueError(message)


class _FlatForward:
    """Mixin that gives a causal language model of transformers the signature that the pipeline exports."""

    def forward(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """[b, s, hidden] embeddings and [b, s] positions to [b, s, vocab] logits."""
        output = super().forward(inputs_embeds=inputs_embeds, position_ids=position_ids, use_cache=False)  # type: ignore[misc]
        return output.logits


@cache
def _flat_class(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The model class with the flat forward; made once per class, so that instances compare and copy as usual."""
    return type(model_class.__name__, (_FlatForward, model_class), {"__module__": __name__})


@ModelFactoryRegistry.register("AutoModelForCausalLM")
class CausalLMFactory(ModelFactory):
    """Causal language models of transformers, with a drafter beside when `speculative_config` asks for one.

    Attention of all of them is the source op `torch_attention`. Random weights are drawn on the CPU, so the same seed
    gives the same model on every device.
    """

    def __init__(self, model: str | None = None, **kwargs: Any) -> None:
        """See `ModelFactory`.

        Raises:
            ValueError: No checkpoint and no `model_type`, or an unknown `decoding_type`.
        """
        super().__init__(model, **kwargs)
        register_with_transformers()
        self._config: PreTrainedConfig | None = None

    @cached_property
    def model_directory(self) -> Path | None:
        """Where the target's checkpoint is; None for random weights."""
        return None if self.model is None else resolve_source(self.model, "model").directory

    @cached_property
    def _drafter_directory(self) -> Path | None:
        spec = self.speculative_config.get("speculative_model")
        return None if spec is None else resolve_source(spec, "speculative_config.speculative_model").directory

    @property
    def target_config(self) -> PreTrainedConfig:
        """The target's config: the checkpoint's or its type's defaults, with `model_kwargs` on top."""
        if self._config is None:
            self._config = self._load_target_config()
        return self._config

    def end_token_ids(self) -> tuple[int, ...]:
        """See `end_tokens`; what `model_kwargs` says goes before the checkpoint's own."""
        if self.model_directory is None:
            return ()
        named = "eos_token_id" in self.model_kwargs
        return end_token_ids(None if named else self.model_directory, self.target_config)

    def _load_target_config(self) -> PreTrainedConfig:
        kwargs = dict(self.model_kwargs)
        if self.model_directory is not None:
            stored = stored_config(self.model_directory)
            with _naming(f"{self.model_directory / 'config.json'} with model_kwargs"):
                config = AutoConfig.from_pretrained(self.model_directory, local_files_only=True, **kwargs)
                _check_spelling(kwargs, type(config), stored)
                return config
        model_type = kwargs.pop("model_type", None)
        if model_type is None:
            raise ValueError("model_kwargs.model_type is missing: name an architecture of transformers, such as llama")
        if model_type not in CONFIG_MAPPING:
            unknown = f"transformers {transformers.__version__} does not know it"
            hint = suggestion(str(model_type), CONFIG_MAPPING, otherwise=unknown)
            raise ValueError(f"model_kwargs.model_type: unknown architecture {model_type!r}{hint}")
        with _naming("model_kwargs"):
            config = AutoConfig.for_model(model_type, **kwargs)
            _check_spelling(kwargs, type(config))
            return config

    @property
    def drafter_family(self) -> DrafterFamily | None:
        """What `decoding_type` names; None without speculation."""
        kind = self.speculative_config.get("decoding_type")
        if kind is None:
            return None
        if kind not in DRAFTER_FAMILIES:
            raise ValueError(f"unknown decoding_type {kind!r}{_nearest(kind, DRAFTER_FAMILIES)}")
        return DRAFTER_FAMILIES[kind]

    def build_model(self) -> nn.Module:
        """The target alone, or an `EagleWrapper` of target and drafter."""
        target = self.build_target()
        if self.drafter_family is None:
            return target
        config = EagleWrapperConfig(self.speculative_config["max_draft_len"], self.temperature)
        return EagleWrapper(config, target, self.build_drafter(target)).eval()

    def build_target(self) -> PreTrainedModel:
        """The target, whose forward takes `inputs_embeds` and `position_ids` and gives logits."""
        config = self.target_config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            target = AutoModelForCausalLM.from_config(
                config, dtype=self.dtype, attn_implementation=ATTENTION_IMPLEMENTATION
            )
        family = TARGET_FAMILIES.get(config.model_type)
        if family is not None:
            if family.prepare is not None:
                family.prepare(target)
            if self.model is None:
                self.initialise_target(family, target)
        model_class: Any = type(target)
        target.__class__ = _flat_class(model_class)
        return target.eval()

    def build_drafter(self, target: PreTrainedModel) -> nn.Module:
        """The drafter for a target."""
        family = self.drafter_family
        if family is None:
            raise ValueError("there is no drafter: speculative_config.decoding_type is not set")
        config = self._drafter_config(family, target.config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + 1)
            drafter = family.build(config, target.config)
        if self._drafter_directory is None:
            self.initialise_drafter(family, drafter, target)
        return drafter.to(self.dtype).eval()

    def initialise_target(self, family: TargetFamily, target: PreTrainedModel) -> None:
        """Fill a target that comes without a checkpoint."""
        family.initialise(target, self.seed)

    def initialise_drafter(self, family: DrafterFamily, drafter: nn.Module, target: PreTrainedModel) -> None:
        """Fill a drafter that comes without a checkpoint."""
        family.initialise(drafter, target, self.seed + 1)

    def _drafter_config(self, family: DrafterFamily, target: PreTrainedConfig) -> PreTrainedConfig:
        """The target's fields, then the kind's, then the checkpoint's, then `speculative_model_kwargs`."""
        fields = target.to_dict() | family.config_defaults
        directory = self._drafter_directory
        if directory is not None:
            stored = stored_config(directory)
            fields |= family.load_config_defaults(self._drafter_weights(family, directory))
            if "rope_theta" in stored or "rope_scaling" in stored:  # as published for transformers 4
                fields.pop("rope_parameters", None)
            fields |= stored
        fields |= self.speculative_model_kwargs
        fields.pop("model_type", None)
        where = "speculative_model_kwargs" if directory is None else f"{directory / 'config.json'}"
        with _naming("speculative_model_kwargs"):
            _check_spelling(self.speculative_model_kwargs, type(target), family.further_fields)
        with _naming(where):
            config = type(target)(**fields)
        config._attn_implementation = ATTENTION_IMPLEMENTATION
        return config

    def _drafter_weights(self, family: DrafterFamily, directory: Path) -> set[str]:
        return {family.weight_name(name) for name in weight_names(directory)}

    def layers_to_capture(self) -> tuple[int, ...]:
        """Those that the drafter's checkpoint or `eagle3_layers_to_capture` names, else the drafter's usual ones.

        Raises:
            ValueError: The target has no such layer, or the drafter was trained on others.
        """
        family = self.drafter_family
        if family is None:
            return ()
        num_layers = self.target_config.num_hidden_layers
        chosen = self.speculative_config.get("eagle3_layers_to_capture")
        directory = self._drafter_directory
        trained = None if directory is None else captured_layers(stored_config(directory).get("eagle_config"))
        if trained and chosen is not None and sorted(set(chosen)) != sorted(trained):
            raise ValueError(
                f"speculative_config.eagle3_layers_to_capture is {chosen}, but the drafter in {directory} reads "
                f"{trained}: leave the field out"
            )
        named = trained if chosen is None else chosen
        layers = tuple(sorted(set(named))) if named else family.capture(num_layers)
        outside = [layer for layer in layers if not 0 <= layer < num_layers]
        if outside:
            raise ValueError(
                f"speculative_config.eagle3_layers_to_capture names layers {outside}, but the target has layers 0 to "
                f"{num_layers - 1}"
            )
        return layers

    def get_export_infos(self, model: nn.Module) -> list[ExportInfo]:
        """The model itself, or the wrapper's target and drafter."""
        if not isinstance(model, EagleWrapper):
            return [ExportInfo("", "model", _example_inputs(model))]
        drafter = model.draft_model
        drafter_inputs = _example_inputs(drafter)
        drafter_inputs["hidden_states"] = torch.zeros_like(drafter_inputs["inputs_embeds"])
        return [
            ExportInfo("target_model", "target", _example_inputs(model.target_model)),
            ExportInfo("draft_model", "draft", drafter_inputs, getattr(drafter, "exported_attributes", ())),
        ]

    def load_or_random_init(self, model: nn.Module, device: torch.device) -> int:
        """See `ModelFactory`; random weights are in place since `build_model`."""
        count = 0
        target = model.target_model if isinstance(model, EagleWrapper) else model
        if self.model_directory is not None:
            count += load_weights(target, self.model_directory)
        family, directory = self.drafter_family, self._drafter_directory
        if family is not None and directory is not None and isinstance(model, EagleWrapper):
            names = self._drafter_weights(family, directory)
            derived = [name for name in family.derived if name not in names]
            count += load_weights(model.draft_model, directory, family.weight_name, derived)
            family.derive(model.draft_model, target, names)
        model.to(device)
        return count


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Say where fields come from that a config of transformers refuses."""
    try:
        yield
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from error


def _example_inputs(module: Any) -> dict[str, torch.Tensor]:
    parameter = next(module.parameters())
    sizes = (EXAMPLE_BATCH, EXAMPLE_SEQUENCE)
    embeds = torch.zeros(*sizes, module.config.hidden_size, dtype=parameter.dtype, device=parameter.device)
    positions = torch.arange(EXAMPLE_SEQUENCE, device=parameter.device).repeat(EXAMPLE_BATCH, 1)
    return {"inputs_embeds": embeds, "position_ids": positions}
