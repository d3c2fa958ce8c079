"""Transform `add_guided_decoding`: lets the Eagle wrapper sample only what requests' grammars allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ConfigDict, Field
from torch import nn

from ..interface import BaseTransform, SharedConfig, Stages, TransformConfig, TransformInfo, TransformRegistry

if TYPE_CHECKING:
    from ...models.factory import ModelFactory
    from ...shim.interface import CachedSequenceInterface


class AddGuidedDecodingConfig(TransformConfig):
    """Config of `add_guided_decoding`."""

    model_config = ConfigDict(extra="forbid")

    stage: Stages = Field(default=Stages.POST_LOAD_FUSION, description="Between loading and tracing.")
    run_per_gm: bool = Field(default=False, description="Runs on the whole model.")


@TransformRegistry.register("add_guided_decoding")
class AddGuidedDecoding(BaseTransform):
    """Give the wrapper the places where masks are applied; an engine brings the masks."""

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """See `AddGuidedDecodingConfig`."""
        return AddGuidedDecodingConfig

    def _apply_to_full_model(
        self, mod: nn.Module, cm: CachedSequenceInterface, factory: ModelFactory, shared_config: SharedConfig
    ) -> tuple[nn.Module, TransformInfo]:
        from ...models.custom.modeling_eagle import EagleWrapper
        from ...models.custom.modeling_guided import GuidedEagleWrapper

        if isinstance(mod, GuidedEagleWrapper):
            return mod, TransformInfo(skipped=True, is_clean=True, has_valid_shapes=True)
        if not isinstance(mod, EagleWrapper):
            raise ValueError(
                f"add_guided_decoding works on an Eagle wrapper, not on {type(mod).__name__}: set speculative_config"
            )
        guided = GuidedEagleWrapper.from_wrapper(mod)
        return guided, TransformInfo(skipped=False, num_matches=1, is_clean=True, has_valid_shapes=True)
