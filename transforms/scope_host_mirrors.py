"""scope_host_mirrors: rewrites an orchestrator so that each metadata mutation mirrors what its consumers read."""

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
from auto_deploy_ext.reports.mirror_plan import MirrorPlan
from auto_deploy_ext.rewriting.scoping import ScopeOptions, scope_module
from auto_deploy_ext.stages import check_runs_once, check_stage


class ScopeHostMirrorsConfig(TransformConfig):
    """Fields of `scope_host_mirrors`."""

    model_config = ConfigDict(extra="forbid")

    stage: Stages = Field(
        default=Stages.CACHE_INIT, description="Late in cache_init: after all placeholders exist, before compile_model."
    )
    run_per_gm: bool = Field(default=False, description="Runs on the whole model; true is refused.")
    requires_clean_graph: bool = Field(
        default=False, description="Cleaning would delete the calls of a hand-built orchestrator graph as dead code."
    )
    run_graph_cleanup: bool = Field(default=False, description="The rewritten graphs are compiled and checked already.")
    orchestrator: str | None = Field(
        default=None, description="Qualified name of the orchestrator in the model; null: the model itself."
    )
    interface_arg: str | None = Field(
        default=None,
        description="The parameter that receives the interface, where neither annotation nor name tells.",
    )
    max_draft_len: int | None = Field(
        default=None, ge=1, description="Drafted tokens per row of the example batches; null: the orchestrator's own."
    )
    strategy: Literal["auto", "copy", "override", "replay"] = Field(
        default="auto",
        description="How mirrors are brought up to date. override: each mutation's own copy is narrowed; copy: one "
        "transfer per consumer; replay: the host repeats mutations, and copies what it cannot; auto: as replay, but a "
        "consumer that must wait for a transfer anyway gets all it needs by it.",
    )
    mode: Literal["auto", "graph", "hooks"] = Field(
        default="auto",
        description="What becomes of an orchestrator that cannot be traced: graph: an error; auto: it stays as it is.",
    )
    on_unknown: Literal["full", "error"] = Field(
        default="full",
        description="A call of unknown effect that receives the interface: full: every mirror is up to date there.",
    )
    insert_missing: bool = Field(
        default=True,
        description="Repair and report stale reads of the orchestrator as written; false: raise, changing nothing.",
    )
    live_out: list[str] = Field(
        default_factory=list, description="Mirrors (`_host` names) that something reads after the forward."
    )
    max_variants: int = Field(
        default=8, ge=1, description="Traced variants kept at most; other batches run the original forward."
    )

    def options(self) -> ScopeOptions:
        """The fields that decide what is rewritten.

        Raises:
            ScopeError: no code stands behind one of them.
        """
        return ScopeOptions(
            orchestrator=self.orchestrator,
            interface_arg=self.interface_arg,
            max_draft_len=self.max_draft_len,
            strategy=self.strategy,
            mode=self.mode,
            on_unknown=self.on_unknown,
            insert_missing=self.insert_missing,
            live_out=tuple(sorted(self.live_out)),
            max_variants=self.max_variants,
        )


@register_transform("scope_host_mirrors")
class ScopeHostMirrors(BaseTransform):
    """Has an orchestrator's mutations mirror nothing but what is read, when it is read.

    1. The orchestrator is the model, or the submodule that `orchestrator` names. One that is an FX graph already is
       rewritten in place; any other is traced once per kind of batch, and its inference path is bound to the rewritten
       variants, with its own forward for batches that none of them fits.
    2. A mirror is brought up to date only if a consumer reads it before its buffer is certainly written again; by the
       mutation's own copy, by a transfer to the consumer or by the host's arithmetic, as `strategy` says.
    3. A consumer that would still find a mirror stale gets it brought up to date right before it.
    4. With `override`, a hand-written override that names all of this is kept; one that does not is widened and
       reported. Other strategies need none. `insert_missing: false` refuses an orchestrator that has such a gap.
    5. All graphs are planned before the first is changed: an error leaves the model as it was.
    6. A second run, of whatever strategy, derives the graphs that it would have derived alone.

    `num_matches` counts the mutation calls that changed.
    """

    config: ScopeHostMirrorsConfig

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """The class that validates this transform's YAML fields."""
        return ScopeHostMirrorsConfig

    def _post_init(self) -> None:
        check_runs_once("scope_host_mirrors", self.config)
        check_stage("scope_host_mirrors", self.config)
        self._options = self.config.options()

    def _apply_to_full_model(
        self, mod: nn.Module, cm: Any, factory: Any, shared_config: SharedConfig
    ) -> tuple[nn.Module, TransformInfo]:
        mirror_plan, changed = scope_module(mod, cm, self._options)
        self._report_plan(mirror_plan)
        skipped = not mirror_plan.variants
        return mod, TransformInfo(skipped=skipped, num_matches=changed, is_clean=True, has_valid_shapes=True)

    def _report_plan(self, mirror_plan: MirrorPlan) -> None:
        for reason in mirror_plan.reasons:
            self._log_info(reason)
        for warning in (*mirror_plan.problems, *mirror_plan.warnings):
            self._log_warning(warning)
