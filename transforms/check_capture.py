"""check_capture: refuses to let anything be captured that contains transfers, host waits or planning on the host."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field
from torch import nn

from auto_deploy_ext.binding import (
    BaseTransform,
    SharedConfig,
    Stages,
    TransformConfig,
    TransformInfo,
    register_transform,
)
from auto_deploy_ext.reports.capture import EAGER_BACKENDS, CaptureError, require_capturable
from auto_deploy_ext.stages import check_runs_once, check_stage


class CheckCaptureConfig(TransformConfig):
    """Fields of `check_capture`."""

    model_config = ConfigDict(extra="forbid")

    stage: Stages = Field(
        default=Stages.CACHE_INIT, description="Last in cache_init: after scope_host_mirrors, before compile_model."
    )
    run_per_gm: bool = Field(default=False, description="Runs on the whole model; true is refused.")
    requires_clean_graph: bool = Field(
        default=False, description="Cleaning would delete the calls of a hand-built orchestrator graph as dead code."
    )
    run_graph_cleanup: bool = Field(default=False, description="Nothing is changed.")
    capture: Literal["consumers", "full", "segments"] = Field(
        default="full",
        description="What becomes a graph: full: the whole orchestrator as one, which is what AutoDeploy's "
        "torch-cudagraph does with a wrapper; consumers: each consumer by itself, with the orchestrator outside; "
        "segments: likewise, with what the host is not needed for around them.",
    )
    compile_backend: str | None = Field(
        default=None,
        description="How the model is compiled; torch-simple and torch-compile capture nothing. null: the config's "
        "compile_backend where the host tells it, else nothing is taken to be captured.",
    )
    orchestrator: str | None = Field(
        default=None, description="Qualified name of the orchestrator in the model; null: the model itself."
    )
    interface_arg: str | None = Field(
        default=None,
        description="The parameter that receives the interface, where neither annotation nor name tells.",
    )


@register_transform("check_capture")
class CheckCapture(BaseTransform):
    """Checks what is going to be captured.

    1. With a compile backend that captures nothing, nothing is checked.
    2. `capture: consumers` or `segments`: no graph of a consumer may use a host mirror, unless only for its attention
       backend's plan, which that makes outside of the graph (an op that plans, `plans_before_capture`, or a
       host-prepare function).
    3. `capture: full`: for each kind of batch that an engine captures, the orchestrator as it will run may neither
       move, wait for, compute nor read a host mirror.
    4. Anything else raises, here, before anything is captured, and names who is in the way and what can be changed. No
       other compile backend is ever chosen instead.
    5. Nothing is changed.

    `num_matches` counts what was captured without objection: 1, or 0 where nothing is captured.
    """

    config: CheckCaptureConfig

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """The class that validates this transform's YAML fields."""
        return CheckCaptureConfig

    def _post_init(self) -> None:
        check_runs_once("check_capture", self.config)
        check_stage("check_capture", self.config)

    def _apply_to_full_model(
        self, mod: nn.Module, cm: Any, factory: Any, shared_config: SharedConfig
    ) -> tuple[nn.Module, TransformInfo]:
        backend = self.config.compile_backend
        if backend is None:
            self._log_warning("the compile backend is not known here, so nothing is taken to be captured")
        captures = backend is not None and backend not in EAGER_BACKENDS
        if backend is not None and captures:
            require_capturable(
                mod, cm, backend, self.config.capture, self.config.orchestrator, self.config.interface_arg
            )
        info = TransformInfo(skipped=not captures, num_matches=int(captures), is_clean=True, has_valid_shapes=True)
        return mod, info


__all__ = ["CaptureError", "CheckCapture", "CheckCaptureConfig"]
