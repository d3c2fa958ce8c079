"""The Eagle wrapper with guided decoding, and with a vision encoder in front of it.

Both stay ordinary eager code that can be traced: what launches host functions is a submodule of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ....hostfuncs.drains import mark_encoder
from ...shim.interface import CachedSequenceInterface
from .modeling_eagle import EagleWrapper

if TYPE_CHECKING:
    from ...guided.decoder import GuidedDecoder


class GuidedStep(nn.Module):
    """One stage of guided decoding as a submodule, so that a tracer keeps its call whole.

    Attributes:
        decoder: what masks; None: nothing is guided.
    """

    launches_hostfuncs = True
    _is_impure = True  # FX must not delete a call whose result is unused

    def __init__(self) -> None:
        super().__init__()
        self.meta: dict[str, Any] = {"active_args": ()}
        self.decoder: GuidedDecoder | None = None

    def forward(self, tensor: torch.Tensor, stage: str) -> torch.Tensor:
        """Let the decoder work on logits (`mask_target`, `mask_draft`) or tokens (`note_target`, `note_draft`)."""
        if self.decoder is None or isinstance(tensor, FakeTensor):
            return tensor
        return getattr(self.decoder, stage)(tensor)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no decoder: that belongs to the engine that made it."""
        return {**self.__dict__, "decoder": None}


class GuidedEagleWrapper(EagleWrapper):
    """An Eagle wrapper whose target and drafter sample only what the requests' grammars allow."""

    guided: GuidedStep

    @classmethod
    def from_wrapper(cls, wrapper: EagleWrapper) -> GuidedEagleWrapper:
        """Turn a wrapper into a guided one that shares its submodules, attributes and meta.

        Raises:
            ValueError: The wrapper draws its tokens; under a grammar they are decoded greedily.
        """
        if wrapper.temperature > 0:
            raise ValueError(f"guided decoding is greedy: set temperature: 0, not {wrapper.temperature}")
        result = cls.__new__(cls)
        nn.Module.__init__(result)
        result.__dict__.update({name: value for name, value in wrapper.__dict__.items() if name != "_modules"})
        result._modules = dict(wrapper._modules)
        if "guided" not in result._modules:
            result.guided = GuidedStep()
        return result

    def forward_target(self, csi: CachedSequenceInterface) -> torch.Tensor:
        """See `EagleWrapper.forward_target`; what the grammars forbid is minus infinity."""
        return self.guided(super().forward_target(csi), "mask_target")

    def sample_target(self, logits: torch.Tensor) -> torch.Tensor:
        """See `EagleWrapper.sample_target`."""
        return self.guided(super().sample_target(logits), "note_target")

    def sample_draft(self, norm_hidden_state: torch.Tensor) -> torch.Tensor:
        """See `EagleWrapper.sample_draft`; drafts follow the grammars too."""
        tokens = self.target_tokens(self.sample(self.guided(self.draft_logits(norm_hidden_state), "mask_draft")))
        return self.guided(tokens.to(torch.int32), "note_draft")


class VisionEncoder(nn.Module):
    """A vision tower of transformers and a projection to the target's width.

    Args:
        vision_config: fields of `SiglipVisionConfig`; weights are random.
        hidden_size: the target's width.
    """

    def __init__(self, vision_config: dict[str, Any], hidden_size: int) -> None:
        super().__init__()
        from transformers import SiglipVisionConfig, SiglipVisionModel

        config = SiglipVisionConfig(**{"vision_use_head": False, **vision_config})
        config._attn_implementation = "eager"
        assert isinstance(config.patch_size, int)
        self.patch_size, self.num_channels = config.patch_size, config.num_channels
        self.tower = SiglipVisionModel(config)
        self.projection = nn.Linear(config.hidden_size, hidden_size)
        mark_encoder(self)

    def num_tokens(self, image: torch.Tensor) -> int:
        """How many tokens an image ``[channels, height, width]`` becomes.

        Raises:
            ValueError: it has another shape, or its sides are no positive multiples of the patch size.
        """
        if image.dim() != 3 or image.shape[0] != self.num_channels or 0 in image.shape:
            raise ValueError(
                f"an image of shape {list(image.shape)} is not [{self.num_channels}, height, width] with sides above 0"
            )
        height, width = image.shape[1:]
        if height % self.patch_size or width % self.patch_size:
            raise ValueError(f"an image of {height}x{width} does not divide into patches of {self.patch_size}")
        return (height // self.patch_size) * (width // self.patch_size)

    def forward(self, pixels: Sequence[torch.Tensor]) -> torch.Tensor:
        """Encode images: each of `pixels` is ``[images, 3, height, width]``, a shape of its own.

        Returns:
            ``[tokens, hidden]``, image after image.
        """
        features = [self.tower(batch, interpolate_pos_encoding=True).last_hidden_state for batch in pixels]
        return torch.cat([self.projection(states).flatten(0, 1) for states in features])


class VisionEagleWrapper(GuidedEagleWrapper):
    """A guided wrapper that puts images where a prompt has placeholders.

    It reads what `set_images` leaves on the interface.
    """

    vision_encoder: VisionEncoder

    @classmethod
    def with_encoder(cls, wrapper: EagleWrapper, encoder: VisionEncoder) -> VisionEagleWrapper:
        """Turn a wrapper into one with a vision encoder; it shares submodules, attributes and meta."""
        result = cls.from_wrapper(wrapper)
        assert isinstance(result, VisionEagleWrapper)
        result.vision_encoder = encoder
        return result

    def embed_target(self, csi: Any) -> torch.Tensor:
        """See `EagleWrapper.embed_target`; placeholders are replaced by their images' features."""
        embeds = super().embed_target(csi)
        if not csi.has_images:
            return embeds
        features = csi.image_features
        if csi.has_new_images:
            features = torch.cat([self.vision_encoder(csi.image_pixels).to(features.dtype), features])
        flat = embeds.flatten(0, 1).index_copy(0, csi.image_positions, features[csi.image_order])
        return flat.view_as(embeds)


def set_images(
    cm: Any,
    pixels: Sequence[torch.Tensor] = (),
    features: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> None:
    """Say which images the batch in an interface has; without arguments, none.

    Args:
        cm: the interface.
        pixels: images that the forward encodes, each ``[images, 3, height, width]``.
        features: ``[tokens, hidden]`` of images that are encoded already, behind those of `pixels`.
        order: int64 ``[tokens]``: which of the features belongs to each position.
        positions: int64 ``[tokens]``: where in the batch's tokens they go.
    """
    cm.has_images = positions is not None
    cm.has_new_images = bool(pixels)
    cm.image_pixels = list(pixels)
    cm.image_features, cm.image_order, cm.image_positions = features, order, positions
