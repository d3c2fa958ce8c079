"""Orchestrators as FX graphs: finding, tracing, guarding and binding them."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from torch.fx import GraphModule

from auto_deploy_ext.hostfuncs.drains import insert_drains

from .dispatch import Dispatcher, bind_variants, dispatcher_of, orchestrator_graphs, original_forward
from .errors import UntraceableError, where_in_traceback
from .example_batches import KINDS, set_batch
from .finding import OrchestratorError, draft_length, find_interface_arg, find_orchestrator, is_orchestrator_graph
from .graph_module import OrchestratorGraph
from .interface_state import preserved
from .rebound import ReboundForward, own_forward, rebound_of
from .tracer import OrchestratorTracer

__all__ = [
    "Dispatcher",
    "OrchestratorError",
    "OrchestratorGraph",
    "ReboundForward",
    "UntraceableError",
    "bind_variants",
    "dispatcher_of",
    "draft_length",
    "find_interface_arg",
    "find_orchestrator",
    "is_orchestrator_graph",
    "orchestrator_graphs",
    "original_forward",
    "own_forward",
    "rebound_of",
    "trace_orchestrator",
    "trace_variants",
]

logger = logging.getLogger("auto_deploy_ext")


def trace_orchestrator(
    module: nn.Module,
    cm: Any,
    *,
    orchestrator: str | None = None,
    interface_arg: str | None = None,
    variant: str = "batch",
) -> GraphModule:
    """Return the FX form of an orchestrator, for the batch that `cm` holds.

    Args:
        module: the wrapper, or a module that contains it; a GraphModule with mutation nodes is returned as it is.
        cm: the CachedSequenceInterface, after `nest_sequences`; its state is the same afterwards, also on error.
        orchestrator: the wrapper's name in `module`.
        interface_arg: the parameter of its forward that receives the interface.
        variant: the name of the result.

    Returns:
        A GraphModule that is called with the interface alone. Its `guards` say for which other batches it is right;
        `graph_module.guards(cm, owner)` tests them.

    Raises:
        UntraceableError: no graph can stand for the forward, or the wrapper asserts that it takes no such batch; the
            line is named.
        OrchestratorError: the wrapper or its interface parameter cannot be found.

    Example:
        >>> from auto_deploy_ext.orchestrator.example_batches import set_batch
        >>> set_batch(cm, "extend", draft_len=3)
        >>> graph_module = trace_orchestrator(wrapper, cm)
        >>> print(graph_module.code)
    """
    try:
        return _trace(module, cm, orchestrator, interface_arg, variant)
    except AssertionError as error:
        counts = cm.info.batch_info.get_num_sequences()
        raise UntraceableError(
            f"the orchestrator asserts that {error or 'it takes no such batch'}; the interface holds a batch of "
            f"{counts[0]} prefill, {counts[1]} extend and {counts[2]} decode rows. Nest one that it takes, for example "
            'with auto_deploy_ext.orchestrator.example_batches.set_batch(cm, "extend", draft_len)',
            where_in_traceback(error.__traceback__),
        ) from error


def _trace(
    module: nn.Module, cm: Any, orchestrator: str | None, interface_arg: str | None, variant: str
) -> GraphModule:
    owner = find_orchestrator(module, orchestrator)
    if isinstance(owner, GraphModule) and is_orchestrator_graph(owner):
        return owner
    forward = own_forward(owner)
    parameter = find_interface_arg(forward, interface_arg)
    proxied: frozenset[str] = frozenset()
    while True:
        tracer = OrchestratorTracer()
        with preserved(cm):
            graph = tracer.trace_forward(owner, forward, parameter, cm, proxied)
        unstable = tracer.module_state.assigned & tracer.module_state.guarded
        if not unstable:
            graph_module = OrchestratorGraph(owner, graph, variant, tracer.guards.build())
            insert_drains(graph_module)
            return graph_module
        proxied |= unstable


def trace_variants(
    module: nn.Module,
    cm: Any,
    *,
    orchestrator: str | None = None,
    interface_arg: str | None = None,
    max_draft_len: int | None = None,
) -> dict[str, OrchestratorGraph]:
    """Trace an orchestrator once for each kind of batch that no earlier trace covers.

    Args:
        module: see `trace_orchestrator`.
        cm: the interface; example batches are set on it and its state is restored.
        orchestrator: see `trace_orchestrator`.
        interface_arg: see `trace_orchestrator`.
        max_draft_len: drafted tokens of an extend row; see `draft_length` for the default.

    Returns:
        The variants by kind of batch, in the order in which a dispatcher tries them. A kind that the wrapper itself
        asserts away, or that the interface is too small for, is left out.

    Raises:
        UntraceableError: a kind cannot be traced, or the wrapper accepts none.
    """
    owner = find_orchestrator(module, orchestrator)
    length = draft_length(owner, cm, max_draft_len)
    find_interface_arg(own_forward(owner), interface_arg)
    variants: dict[str, OrchestratorGraph] = {}
    left_out: list[str] = []
    for kind in KINDS:
        with preserved(cm):
            try:
                set_batch(cm, kind, length)
            except ValueError as error:
                left_out.append(f"{kind}: {error}")
                continue
            if any(v.guards(cm, owner) for v in variants.values()):
                continue
            try:
                traced = _trace(owner, cm, None, interface_arg, kind)
            except AssertionError as error:
                left_out.append(f"{kind}: the wrapper asserts {error}")
                continue
            assert isinstance(traced, OrchestratorGraph)
            variants[kind] = traced
    if not variants:
        raise UntraceableError(f"{type(owner).__name__} takes none of the example batches ({'; '.join(left_out)})")
    for reason in left_out:
        logger.debug("no example batch %s", reason)
    return variants
