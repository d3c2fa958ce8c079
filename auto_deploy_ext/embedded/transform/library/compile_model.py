"""Transform `compile_model`: hands the model to a compile backend."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING

from pydantic import ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError
from torch import nn

from ..interface import BaseTransform, SharedConfig, TransformConfig, TransformInfo, TransformRegistry

if TYPE_CHECKING:
    from ...models.factory import ModelFactory
    from ...shim.interface import CachedSequenceInterface

CompileBackend = Callable[[nn.Module, "CachedSequenceInterface"], nn.Module]


def compile_simple(mod: nn.Module, cm: CachedSequenceInterface) -> nn.Module:
    """Run the graphs as they are, in eval mode."""
    return mod.eval()


COMPILE_BACKENDS: dict[str, CompileBackend] = {"torch-simple": compile_simple}
"""By name; each gives the module to be called from then on."""


class CompileModelConfig(TransformConfig):
    """Config of `compile_model`."""

    model_config = ConfigDict(extra="forbid")

    backend: str = Field(default="torch-simple", description="How the model is compiled: a key of COMPILE_BACKENDS.")

    @field_validator("backend")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in COMPILE_BACKENDS:
            known = ", ".join(sorted(COMPILE_BACKENDS))
            near = difflib.get_close_matches(value, COMPILE_BACKENDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise PydanticCustomError("compile_backend", f"the embedded host compiles with {known}{hint}")
        return value


@TransformRegistry.register("compile_model")
class CompileModel(BaseTransform):
    """Compile the whole model."""

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """See `CompileModelConfig`."""
        return CompileModelConfig

    def _apply_to_full_model(
        self, mod: nn.Module, cm: CachedSequenceInterface, factory: ModelFactory, shared_config: SharedConfig
    ) -> tuple[nn.Module, TransformInfo]:
        assert isinstance(self.config, CompileModelConfig)
        compiled = COMPILE_BACKENDS[self.config.backend](mod, cm)
        return compiled, TransformInfo(skipped=False, num_matches=1, is_clean=True, has_valid_shapes=True)
