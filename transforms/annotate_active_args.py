"""annotate_active_args: writes into every consumer graph, and onto every call of one, which arguments it reads."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field
from torch import nn
from torch.fx import GraphModule

from auto_deploy_ext.active_args import META_KEY, annotate
from auto_deploy_ext.analysis.interface_nodes import is_orchestrator_graph
from auto_deploy_ext.binding import (
    BaseTransform,
    SharedConfig,
    Stages,
    TransformConfig,
    TransformInfo,
    register_transform,
)
from auto_deploy_ext.orchestrator import orchestrator_graphs
from auto_deploy_ext.rewriting.rewrite import annotate_calls
from auto_deploy_ext.stages import check_runs_once, check_stage


class AnnotateActiveArgsConfig(TransformConfig):
    """Fields of `annotate_active_args`."""

    model_config = ConfigDict(extra="forbid")

    stage: Stages = Field(default=Stages.CACHE_INIT, description="Late in cache_init: all placeholders exist then.")
    run_per_gm: bool = Field(default=False, description="Runs on the whole model; true is refused.")
    requires_clean_graph: bool = Field(
        default=False, description="Cleaning would delete the calls of a hand-built orchestrator graph as dead code."
    )
    run_graph_cleanup: bool = Field(default=False, description="Only `meta` changes.")


@register_transform("annotate_active_args")
class AnnotateActiveArgs(BaseTransform):
    """Annotates consumers.

    1. Every GraphModule in the model that is not an orchestrator graph gets `gm.meta["active_args"]`: the sorted tuple
       of its placeholders' targets. So does a compiled module that holds one.
    2. Every node of an orchestrator graph that calls such a module gets the same tuple as `node.meta["active_args"]`.
    3. Nothing else changes; a second run changes nothing.

    `num_matches` counts annotated modules.
    """

    config: AnnotateActiveArgsConfig

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """The class that validates this transform's YAML fields."""
        return AnnotateActiveArgsConfig

    def _post_init(self) -> None:
        check_runs_once("annotate_active_args", self.config)
        check_stage("annotate_active_args", self.config)

    def _apply_to_full_model(
        self, mod: nn.Module, cm: Any, factory: Any, shared_config: SharedConfig
    ) -> tuple[nn.Module, TransformInfo]:
        graphs = [m for m in mod.modules() if isinstance(m, GraphModule)]
        orchestrators = [gm for gm in graphs if is_orchestrator_graph(gm)]
        consumers = [gm for gm in graphs if gm not in orchestrators]
        for gm in consumers:
            annotate(gm)
            self._log_debug(f"{type(gm).__name__}: {', '.join(gm.meta[META_KEY])}")
        for gm in dict.fromkeys((*orchestrators, *orchestrator_graphs(mod).values())):
            annotate_calls(gm)
        return mod, TransformInfo(skipped=False, num_matches=len(consumers), is_clean=True, has_valid_shapes=True)
