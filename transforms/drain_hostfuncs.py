"""drain_hostfuncs: makes the orchestrator wait for outstanding host functions before it calls an encoder."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
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
from auto_deploy_ext.hostfuncs.drains import (
    DrainPlan,
    DrainSite,
    called_module,
    drain_eagerly,
    drain_in_graphs,
    insert_drains,
    is_encoder,
    is_hooked,
    mark_encoder,
    sites_in,
    traced_through,
)
from auto_deploy_ext.orchestrator import find_orchestrator, orchestrator_graphs
from auto_deploy_ext.spelling import suggestion
from auto_deploy_ext.stages import check_runs_once


class DrainError(ValueError):
    """The encoders cannot be found, or not be drained before."""


class DrainHostfuncsConfig(TransformConfig):
    """Fields of `drain_hostfuncs`."""

    model_config = ConfigDict(extra="forbid")

    stage: Stages = Field(
        default=Stages.CACHE_INIT, description="Late in cache_init, in front of scope_host_mirrors, which traces."
    )
    run_per_gm: bool = Field(default=False, description="Runs on the whole model; true is refused.")
    requires_clean_graph: bool = Field(
        default=False, description="Cleaning would delete the calls of a hand-built orchestrator graph as dead code."
    )
    run_graph_cleanup: bool = Field(default=False, description="The changed graphs are compiled and checked already.")
    encoders: list[str] = Field(
        default_factory=list,
        description="Qualified names or patterns (vision_*) of the encoders, beside those that the model marks.",
    )
    orchestrator: str | None = Field(
        default=None, description="Qualified name of the orchestrator in the model; null: the model itself."
    )
    mode: Literal["auto", "graph", "hooks"] = Field(
        default="auto",
        description="auto: nodes in graphs and a pre-hook for eager calls; graph: no orchestrator graph is an error; "
        "hooks: pre-hooks alone, also where graphs are traced later.",
    )


@register_transform("drain_hostfuncs")
class DrainHostfuncs(BaseTransform):
    """Puts drains before encoders.

    1. Encoders are the modules that `encoders` names and those that are marked (`mark_encoder`); a name that matches no
       module is an error. Of a match and a match inside it, the outer one counts.
    2. In an orchestrator graph a side-effectful node stands directly before the call of an encoder, unless nothing can
       be pending there: at entry something may be; the call of a GraphModule, of a captured module, or of anything
       that is not known to launch no host function makes it so again (`may_launch`); a drain clears it. So adjacent
       encoders share one.
    3. A graph that is traced later, by `scope_host_mirrors` or for a new kind of batch, gets its nodes then.
    4. Every call of an encoder meets a forward pre-hook that does the same where something is pending: eager calls do;
       behind a node nothing is, so a graph's call drains once.
    5. With `mode: hooks` there is the pre-hook alone: no graph gets nodes, now or later.
    6. A second run changes nothing.

    `num_matches` counts new nodes and hooks.
    """

    config: DrainHostfuncsConfig

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """The class that validates this transform's YAML fields."""
        return DrainHostfuncsConfig

    def _post_init(self) -> None:
        check_runs_once("drain_hostfuncs", self.config)

    def _apply_to_full_model(
        self, mod: nn.Module, cm: Any, factory: Any, shared_config: SharedConfig
    ) -> tuple[nn.Module, TransformInfo]:
        encoders = find_encoders(mod, self.config.encoders)
        owner = find_orchestrator(mod, self.config.orchestrator)
        graphs = dict(graphs_that_call(mod, owner)) if self.config.mode != "hooks" else {}
        if self.config.mode == "graph" and encoders and not _has_calls(owner, graphs, encoders):
            raise DrainError(
                f"mode: graph, but {type(owner).__name__} has no orchestrator graph: run scope_host_mirrors before, or "
                "use mode: auto, which drains before eager calls as well"
            )
        _check_calls(graphs, encoders)
        for module in encoders.values():
            mark_encoder(module)
            if self.config.mode != "hooks":
                drain_in_graphs(module)
        changed = sum(map(drain_eagerly, encoders.values()))
        changed += sum(insert_drains(gm) for gm in graphs.values())
        self._log_info(drain_plan(mod, self.config.orchestrator).to_text())
        return mod, TransformInfo(skipped=not encoders, num_matches=changed, is_clean=True, has_valid_shapes=True)


def find_encoders(mod: nn.Module, patterns: list[str]) -> dict[str, nn.Module]:
    """The encoders of a model by qualified name, the outer ones where one lies in another.

    Raises:
        DrainError: a pattern matches no module.
    """
    modules = {name: module for name, module in mod.named_modules() if name}
    found = {name: module for name, module in modules.items() if is_encoder(module)}
    for pattern in patterns:
        matches = {name: module for name, module in modules.items() if fnmatchcase(name, pattern)}
        if not matches:
            hint = suggestion(pattern, modules, otherwise=f"it has {', '.join(list(modules)[:8]) or 'none'}")
            raise DrainError(f"encoders: {pattern!r} matches no module of {type(mod).__name__}{hint}")
        found |= matches
    return {
        name: module
        for name, module in sorted(found.items())
        if not any(name.startswith(f"{outer}.") for outer in found)
    }


def graphs_that_call(mod: nn.Module, owner: nn.Module) -> Iterator[tuple[str, GraphModule]]:
    """The orchestrator's graphs, and graphs in the model that call modules, by name."""
    seen: set[int] = set()
    named = [*orchestrator_graphs(owner).items()]
    named += [(name or "graph", gm) for name, gm in mod.named_modules() if isinstance(gm, GraphModule)]
    for name, gm in named:
        if id(gm) not in seen:
            seen.add(id(gm))
            yield name, gm


def _has_calls(owner: nn.Module, graphs: dict[str, GraphModule], encoders: dict[str, nn.Module]) -> bool:
    """Whether there is an orchestrator graph, or any graph that calls an encoder."""
    chosen = set(map(id, encoders.values()))
    calls = (id(called_module(gm, node)) for gm in graphs.values() for node in gm.graph.find_nodes(op="call_module"))
    return bool(orchestrator_graphs(owner)) or any(module in chosen for module in calls)


def _check_calls(graphs: dict[str, GraphModule], encoders: dict[str, nn.Module]) -> None:
    """A graph that was traced before an encoder was marked may hold the encoder's inside instead of its call."""
    for name, gm in graphs.items():
        paths = {id(module): path for path, module in gm.named_modules()}
        for encoder, module in encoders.items():
            if id(module) in paths and traced_through(gm, paths[id(module)]):
                raise DrainError(
                    f"graph {name!r} was traced through encoder {encoder!r} and holds its inside: put drain_hostfuncs "
                    "in front of scope_host_mirrors, or mark the encoder (mark_encoder) when the model is built"
                )


def drain_plan(mod: nn.Module, orchestrator: str | None = None) -> DrainPlan:
    """Where drains stand in a model: its orchestrator's graphs, graphs that call encoders, and eager calls."""
    sites = [
        site for name, gm in graphs_that_call(mod, find_orchestrator(mod, orchestrator)) for site in sites_in(gm, name)
    ]
    hooks = [DrainSite("", name, "hook") for name, module in find_encoders(mod, []).items() if is_hooked(module)]
    return DrainPlan((*sites, *hooks))


__all__ = ["DrainError", "DrainHostfuncs", "DrainHostfuncsConfig", "drain_plan", "find_encoders"]
