"""Transform `export_to_gm`: turns target and drafter into GraphModules by torch.export."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ConfigDict
from torch import nn

from ...export import export_module
from ..graph import replace_module
from ..interface import BaseTransform, SharedConfig, TransformConfig, TransformInfo, TransformRegistry

if TYPE_CHECKING:
    from ...models.factory import ModelFactory
    from ...shim.interface import CachedSequenceInterface


class ExportToGMConfig(TransformConfig):
    """Config of `export_to_gm`."""

    model_config = ConfigDict(extra="forbid")


@TransformRegistry.register("export_to_gm")
class ExportToGM(BaseTransform):
    """Replace what the factory's `get_export_infos` names by `ExportedGraphModule`s with dynamic batch and sequence."""

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """See `ExportToGMConfig`."""
        return ExportToGMConfig

    def _apply_to_full_model(
        self, mod: nn.Module, cm: CachedSequenceInterface, factory: ModelFactory, shared_config: SharedConfig
    ) -> tuple[nn.Module, TransformInfo]:
        infos = factory.get_export_infos(mod)
        for info in infos:
            eager = mod.get_submodule(info.path)
            mod = replace_module(mod, eager, export_module(eager, info.example_inputs, role=info.role, kept=info.kept))
        return mod, TransformInfo(skipped=False, num_matches=len(infos), is_clean=True, has_valid_shapes=True)
