"""The static check: which consumers read stale mirrors, in an orchestrator as written and as rewritten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from torch.fx import GraphModule

from auto_deploy_ext.analysis.events import Kind, Program
from auto_deploy_ext.analysis.interface_nodes import is_orchestrator_graph
from auto_deploy_ext.analysis.liveness import StaleRead, proof_path
from auto_deploy_ext.effects import mirror_of
from auto_deploy_ext.orchestrator import find_orchestrator, orchestrator_graphs, trace_variants
from auto_deploy_ext.reports.as_run import as_run, stale_as_run
from auto_deploy_ext.rewriting.scoping import STRATEGY_KEY, ScopeOptions, analyse

AS_WRITTEN, REWRITTEN = "as written", "rewritten"


@dataclass(frozen=True)
class StaleFinding:
    """A mirror that a consumer reads while it is stale.

    Attributes:
        form: `AS_WRITTEN` or `REWRITTEN`.
        variant: the traced variant's name.
        consumer: the consumer's name.
        mirror: the mirror's `_host` name.
        path: the way from the last write to the read, a line per step.
    """

    form: str
    variant: str
    consumer: str
    mirror: str
    path: tuple[str, ...]

    def __str__(self) -> str:
        steps = "".join(f"\n    {step}" for step in self.path)
        return f"{self.form}, {self.variant}: {self.consumer} reads {self.mirror}, which is stale there:{steps}"


@dataclass
class CheckResult:
    """What the static check of one orchestrator found.

    Attributes:
        stale: stale reads, in program order.
        checked: the variants that were looked at, by form; a form that does not exist is left out.
        reads: how many mirror reads these have, by form.
    """

    stale: list[StaleFinding] = field(default_factory=list)
    checked: dict[str, tuple[str, ...]] = field(default_factory=dict)
    reads: dict[str, int] = field(default_factory=dict)

    def add(self, form: str, graphs: Mapping[str, GraphModule], cm: Any, options: ScopeOptions) -> None:
        """Check graphs by variant name.

        Raises:
            UnknownEffectError: with `on_unknown: error`, a call whose effect on mirrors is unknown.
        """
        self.checked[form] = tuple(graphs)
        self.reads[form] = 0
        for variant, analysis in analyse(graphs, cm, options).items():
            program, problems = analysis.program, analysis.problems
            if form == REWRITTEN:
                program = as_run(program)
                problems = stale_as_run(program, analysis.traits, options.live_out)
            self.reads[form] += _count_reads(program)
            self.stale.extend(_findings(form, variant, program, problems))

    def to_json(self) -> dict[str, Any]:
        """The fields as plain dicts and lists."""
        return asdict(self)

    def to_text(self) -> str:
        """The findings, or a line that says that there is none."""
        if self.stale:
            return "\n".join(map(str, self.stale))
        looked = (
            f"{form}: {', '.join(names)}, {self.reads[form]} mirror reads" for form, names in self.checked.items()
        )
        return f"nothing stale ({'; '.join(looked)})"


def check_module(module: nn.Module, cm: Any, options: ScopeOptions) -> CheckResult:
    """Check an orchestrator as it is written, and as it is rewritten where the pass has run; it stays as it is.

    An un-narrowed mutation brings every mirror up to date, so a wrapper that nobody narrowed passes as written unless
    something writes a buffer on the device alone.

    Args:
        module: the model.
        cm: the CachedSequenceInterface; its state is the same afterwards.
        options: those of `scope_host_mirrors`.

    Raises:
        UntraceableError: the orchestrator cannot be traced, so nothing can be said.
        UnknownEffectError: with `on_unknown: error`, a call whose effect on mirrors is unknown.
    """
    result = CheckResult()
    owner = find_orchestrator(module, options.orchestrator)
    if isinstance(owner, GraphModule):
        if is_orchestrator_graph(owner):
            graphs = {str(getattr(owner, "variant", "graph")): owner}
            result.add(AS_WRITTEN, graphs, cm, options)
            if STRATEGY_KEY in owner.meta:
                result.add(REWRITTEN, graphs, cm, options)
        return result
    written = trace_variants(owner, cm, interface_arg=options.interface_arg, max_draft_len=options.max_draft_len)
    result.add(AS_WRITTEN, written, cm, options)
    rewritten = orchestrator_graphs(owner)
    if rewritten:
        result.add(REWRITTEN, rewritten, cm, options)
    return result


def _count_reads(program: Program) -> int:
    return sum(len(program.table.mirrors(e.reads)) for e in program.flat if e.kind is Kind.READ)


def _findings(form: str, variant: str, program: Program, problems: list[StaleRead]) -> Iterator[StaleFinding]:
    for read in problems:
        for buffer in program.table.buffers(read.stale):
            path = proof_path(program, read, buffer)
            yield StaleFinding(form, variant, read.consumer.name, mirror_of(buffer), path)
