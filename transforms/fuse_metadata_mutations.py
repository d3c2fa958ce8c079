"""fuse_metadata_mutations: has each run of metadata mutations between two consumers done by one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field
from torch import nn
from torch.fx import GraphModule

from auto_deploy_ext.binding import (
    BaseTransform,
    SharedConfig,
    Stages,
    TransformConfig,
    TransformInfo,
    register_transform,
)
from auto_deploy_ext.orchestrator import find_orchestrator, is_orchestrator_graph, orchestrator_graphs
from auto_deploy_ext.rewriting.fusion import (
    FusionError,
    fuse_graphs,
    fuse_variants_to_come,
    fused_runs,
    reason_not_to_fuse,
)
from auto_deploy_ext.stages import check_runs_once, check_stage


class FuseMetadataMutationsConfig(TransformConfig):
    """Fields of `fuse_metadata_mutations`."""

    model_config = ConfigDict(extra="forbid")

    stage: Stages = Field(
        default=Stages.CACHE_INIT,
        description="Late in cache_init: behind scope_host_mirrors, whose graphs it changes, before compile_model.",
    )
    run_per_gm: bool = Field(default=False, description="Runs on the whole model; true is refused.")
    requires_clean_graph: bool = Field(
        default=False, description="Cleaning would delete the calls of a hand-built orchestrator graph as dead code."
    )
    run_graph_cleanup: bool = Field(default=False, description="The changed graphs are compiled and checked already.")
    orchestrator: str | None = Field(
        default=None, description="Qualified name of the orchestrator in the model; null: the model itself."
    )
    interface_arg: str | None = Field(
        default=None,
        description="The parameter that receives the interface, where neither annotation nor name tells.",
    )
    on_unsupported: Literal["skip", "error"] = Field(
        default="skip",
        description="A host, or an orchestrator without graphs, for which nothing can be fused: skip leaves it as it "
        "is and logs why; error raises.",
    )


@register_transform("fuse_metadata_mutations")
class FuseMetadataMutations(BaseTransform):
    """Puts one node in the place of each run of metadata mutations.

    1. It works on orchestrator graphs: those that `scope_host_mirrors` made, of whatever strategy, variants that are
       traced later included, and models that are such graphs themselves.
    2. A run is what stands between two consumers or other nodes that may see what a mutation does
       (`fusion.FusionFinder` has the rules). It is `switch_to_generate_`, `copy_` and `offset_pos_and_cache_`, in any
       order; either of the first and the last alone is one too, because it is many kernels.
    3. Device buffers, mirrors, lengths, versions and transfers are what they would be without it.
    4. `plan`, `check_capture` and another run of `scope_host_mirrors` see the mutations that a fused node stands for.
    5. Where nothing can be fused (a host whose buffers are laid out otherwise, no Triton, an orchestrator with mirrors
       on demand), the model stays as it is, and the log says why; or, with `on_unsupported: error`, an error does.
    6. A second run changes nothing.

    `num_matches` counts new fused nodes.
    """

    config: FuseMetadataMutationsConfig

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """The class that validates this transform's YAML fields."""
        return FuseMetadataMutationsConfig

    def _post_init(self) -> None:
        check_runs_once("fuse_metadata_mutations", self.config)
        check_stage("fuse_metadata_mutations", self.config)

    def _apply_to_full_model(
        self, mod: nn.Module, cm: Any, factory: Any, shared_config: SharedConfig
    ) -> tuple[nn.Module, TransformInfo]:
        owner = find_orchestrator(mod, self.config.orchestrator)
        graphs = _graphs_of(owner)
        reason = reason_not_to_fuse(cm) or (None if graphs else _NO_GRAPHS)
        if reason is not None:
            if self.config.on_unsupported == "error":
                raise FusionError(f"fuse_metadata_mutations: {reason}; on_unsupported: skip leaves the model as it is")
            self._log_warning(f"metadata mutations stay as they are: {reason}")
            return mod, TransformInfo(skipped=True, num_matches=0, is_clean=True, has_valid_shapes=True)
        fused = fuse_graphs(graphs.values(), cm, self.config.interface_arg)
        fuse_variants_to_come(owner, self.config.interface_arg)
        for name, runs in fused_runs(graphs).items():
            self._log_info(f"{name}: " + ("; ".join(map(" + ".join, runs)) or "no mutations to fuse"))
        return mod, TransformInfo(skipped=False, num_matches=fused, is_clean=True, has_valid_shapes=True)


_NO_GRAPHS = (
    "the orchestrator has no graphs; put fuse_metadata_mutations behind scope_host_mirrors (an orchestrator that "
    "cannot be traced, or runs with mode: hooks, has none then either)"
)


def _graphs_of(owner: nn.Module) -> Mapping[str, GraphModule]:
    """The orchestrator's graphs by name."""
    if isinstance(owner, GraphModule):
        return {"graph": owner} if is_orchestrator_graph(owner) else {}
    return orchestrator_graphs(owner)


__all__ = ["FuseMetadataMutations", "FuseMetadataMutationsConfig", "FusionError"]
