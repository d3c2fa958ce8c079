"""Transform `compile_model`: hands the model to a compile backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pydantic import ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError
from torch import nn

from ....spelling import suggestion
from ...compile.backend import capture_model
from ..interface import BaseTransform, SharedConfig, TransformConfig, TransformInfo, TransformRegistry

if TYPE_CHECKING:
    from ...models.factory import ModelFactory
    from ...shim.interface import CachedSequenceInterface


class CompileModelConfig(TransformConfig):
    """Config of `compile_model`."""

    model_config = ConfigDict(extra="forbid")

    backend: str = Field(default="torch-simple", description="How the model is compiled: a key of COMPILE_BACKENDS.")
    capture: Literal["consumers", "full", "segments"] = Field(
        default="consumers",
        description="With torch-cudagraph: consumers makes each consumer a device graph, full the whole rewritten "
        "orchestrator of an extend-only batch, segments all of it that lies between two calls of the host.",
    )
    cuda_graph_batch_sizes: list[int] | None = Field(
        default=None,
        min_length=1,
        description="With torch-cudagraph: the numbers of rows that become graphs; null: 1, 2, 4, 8, ... and "
        "max_batch_size.",
    )

    @field_validator("backend")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in COMPILE_BACKENDS:
            known = ", ".join(sorted(COMPILE_BACKENDS))
            hint = suggestion(value, COMPILE_BACKENDS)
            raise PydanticCustomError("compile_backend", f"the embedded host compiles with {known}{hint}")
        return value


CompileBackend = Callable[[nn.Module, "CachedSequenceInterface", CompileModelConfig], tuple[nn.Module, int]]


def compile_simple(mod: nn.Module, cm: CachedSequenceInterface, config: CompileModelConfig) -> tuple[nn.Module, int]:
    """Run the graphs as they are, in eval mode."""
    return mod.eval(), 1


def compile_cudagraph(mod: nn.Module, cm: CachedSequenceInterface, config: CompileModelConfig) -> tuple[nn.Module, int]:
    """Run decode batches as device graphs; see `capture_model`."""
    return capture_model(mod.eval(), cm, config.capture, config.cuda_graph_batch_sizes, config.backend)


COMPILE_BACKENDS: dict[str, CompileBackend] = {"torch-cudagraph": compile_cudagraph, "torch-simple": compile_simple}
"""By name; each gives the module to be called from then on, and how many parts of it were compiled."""


@TransformRegistry.register("compile_model")
class CompileModel(BaseTransform):
    """Compile the whole model.

    `num_matches` counts what was compiled: the model, or its consumers, unless with `capture: full`.
    """

    config: CompileModelConfig

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """See `CompileModelConfig`."""
        return CompileModelConfig

    def _apply_to_full_model(
        self, mod: nn.Module, cm: CachedSequenceInterface, factory: ModelFactory, shared_config: SharedConfig
    ) -> tuple[nn.Module, TransformInfo]:
        compiled, matches = COMPILE_BACKENDS[self.config.backend](mod, cm, self.config)
        return compiled, TransformInfo(skipped=False, num_matches=matches, is_clean=True, has_valid_shapes=True)
