"""Model factory `RandomCausalLM`: large models with random weights that are drawn where the model runs, in a moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from .factory import CausalLMFactory, ModelFactoryRegistry
from .families import DrafterFamily, TargetFamily

_RANDOM_FILLS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


class _LeftUnfilled(TorchDispatchMode):
    """While active, random fills do nothing: gigabytes that are overwritten later need no numbers."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return args[0] if func in _RANDOM_FILLS else func(*args, **(kwargs or {}))


@ModelFactoryRegistry.register("RandomCausalLM")
class RandomCausalLMFactory(CausalLMFactory):
    """The models of `AutoModelForCausalLM`, for measuring: their weights are noise and no drafter guesses anything.

    The model is built and exported on the CPU in memory that nobody touches; only then are its weights made, on the
    device. A target of eight billion parameters takes seconds. Checkpoints are refused.
    """

    def build_model(self) -> nn.Module:
        """See `CausalLMFactory`; the weights are uninitialised.

        Raises:
            ValueError: A checkpoint is named, which would be ignored.
        """
        if self.model is not None or self.speculative_config.get("speculative_model") is not None:
            raise ValueError(
                "model_factory RandomCausalLM makes random weights: leave out model and "
                "speculative_config.speculative_model, or take AutoModelForCausalLM"
            )
        with _LeftUnfilled():
            return super().build_model()

    def initialise_target(self, family: TargetFamily, target: PreTrainedModel) -> None:
        """Leave it for `load_or_random_init`."""

    def initialise_drafter(self, family: DrafterFamily, drafter: nn.Module, target: PreTrainedModel) -> None:
        """Leave it for `load_or_random_init`."""

    @torch.no_grad()
    def load_or_random_init(self, model: nn.Module, device: torch.device) -> int:
        """Move what is no weight, and draw the weights on the device: matrices of gain one, vectors of ones."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            is_weight = isinstance(tensor, nn.Parameter)
            return torch.empty_like(tensor, device=device) if is_weight else tensor.to(device)

        model._apply(moved)
        generator = torch.Generator(device=device).manual_seed(self.seed)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.fill_(1.0)
            parameter.requires_grad_(False)
        return 0
