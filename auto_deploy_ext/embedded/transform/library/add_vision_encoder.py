"""Transform `add_vision_encoder`: puts a vision encoder with random weights in front of the Eagle wrapper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pydantic import ConfigDict, Field
from torch import nn

from ..interface import BaseTransform, SharedConfig, Stages, TransformConfig, TransformInfo, TransformRegistry

if TYPE_CHECKING:
    from ...models.factory import ModelFactory
    from ...shim.interface import CachedSequenceInterface


class AddVisionEncoderConfig(TransformConfig):
    """Config of `add_vision_encoder`."""

    model_config = ConfigDict(extra="forbid")

    stage: Stages = Field(default=Stages.POST_LOAD_FUSION, description="Between loading and tracing.")
    run_per_gm: bool = Field(default=False, description="Runs on the whole model.")
    vision_config: dict[str, Any] = Field(
        default_factory=dict, description="Fields of transformers' SiglipVisionConfig that differ from its defaults."
    )
    seed: int = Field(default=0, ge=0, description="The seed of the encoder's weights.")


@TransformRegistry.register("add_vision_encoder")
class AddVisionEncoder(BaseTransform):
    """Make the encoder on the target's device, in its dtype, marked as an encoder."""

    config: AddVisionEncoderConfig

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """See `AddVisionEncoderConfig`."""
        return AddVisionEncoderConfig

    def _apply_to_full_model(
        self, mod: nn.Module, cm: CachedSequenceInterface, factory: ModelFactory, shared_config: SharedConfig
    ) -> tuple[nn.Module, TransformInfo]:
        from ...models.custom.modeling_eagle import EagleWrapper
        from ...models.custom.modeling_guided import VisionEagleWrapper, VisionEncoder, set_images

        if not isinstance(mod, EagleWrapper):
            raise ValueError(
                f"add_vision_encoder works on an Eagle wrapper, not on {type(mod).__name__}: set speculative_config"
            )
        weight = mod.target_model.get_input_embeddings().weight
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            encoder = VisionEncoder(self.config.vision_config, weight.shape[1])
        encoder = encoder.to(device=weight.device, dtype=weight.dtype).eval()
        set_images(cm)
        wrapper = VisionEagleWrapper.with_encoder(mod, encoder)
        return wrapper, TransformInfo(skipped=False, num_matches=1, is_clean=True, has_valid_shapes=True)
