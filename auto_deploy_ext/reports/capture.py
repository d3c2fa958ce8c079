"""What stands in the way of capturing a model as device graphs: transfers, waits and planning on the host."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from auto_deploy_ext.active_args import META_KEY, wrapped_graph
from auto_deploy_ext.analysis.events import Event, Kind, Program, Setting
from auto_deploy_ext.analysis.interface_nodes import is_orchestrator_graph
from auto_deploy_ext.analysis.program import collect
from auto_deploy_ext.binding import host
from auto_deploy_ext.effects import is_mirror, mirror_of
from auto_deploy_ext.orchestrator import (
    UntraceableError,
    draft_length,
    find_orchestrator,
    ops,
    orchestrator_graphs,
    trace_orchestrator,
)
from auto_deploy_ext.orchestrator.example_batches import set_batch
from auto_deploy_ext.orchestrator.interface_state import preserved
from auto_deploy_ext.reports.as_run import as_run, override_in_graph, replays_in_graph
from auto_deploy_ext.rewriting.scoping import host_traits
from auto_deploy_ext.rewriting.strategies import Mirroring

#: AutoDeploy's compile backends that capture nothing; any other is taken to capture.
EAGER_BACKENDS = frozenset({"torch-simple", "torch-compile"})

#: batches that an engine captures: verification of drafts, and plain decoding. Prefills run outside of graphs.
CAPTURED_KINDS = ("extend", "decode")

_HOST_PREPARE = "run_host_prepare_for_attention_forward"


class CaptureError(RuntimeError):
    """What the configuration captures contains something that no device graph can contain."""


@dataclass(frozen=True)
class Obstacle:
    """One thing that no device graph can contain.

    Attributes:
        where: the consumer's name, or the call's name and place.
        names: the placeholders that ask for mirrors, or the mirrors that travel; sorted.
        text: a sentence for people.
    """

    where: str
    names: tuple[str, ...]
    text: str


# -- consumers ---------------------------------------------------------------------------------------------------------


def obstacles_in_consumers(mod: nn.Module) -> list[Obstacle]:
    """What keeps each consumer's graph of a model from being captured by itself.

    A consumer is in the way if a node of it uses a host mirror, unless that is an op that plans, which whoever captures
    takes out of the graph, or the cached op of an attention backend that only needs the mirror for a plan that is made
    outside of the graph: its `plans_before_capture` says so, or, on a host whose descriptors have no such method, it
    has a host-prepare function.
    """
    owners = _descriptors_by_op()
    plan_ops = _plan_ops()
    found: list[Obstacle] = []
    seen: list[GraphModule] = []
    for name, module in mod.named_modules():
        annotation = (getattr(module, "meta", None) or {}).get(META_KEY)
        gm = module if isinstance(module, GraphModule) or annotation is None else wrapped_graph(module)
        if isinstance(gm, GraphModule):
            if not any(gm is known for known in seen) and not is_orchestrator_graph(gm):
                seen.append(gm)
                found.extend(_of_graph(name or type(mod).__name__, gm, owners, plan_ops))
        elif annotation is not None:
            found.extend(_of_opaque(name or type(mod).__name__, annotation))
    return found


def _of_opaque(name: str, arguments: tuple[str, ...]) -> Iterator[Obstacle]:
    mirrors = tuple(sorted(filter(is_mirror, arguments)))
    if mirrors:
        yield _reads(name, mirrors, ())


def _of_graph(
    name: str, gm: GraphModule, owners: Mapping[Any, tuple[str, bool]], plan_ops: Collection[Any]
) -> Iterator[Obstacle]:
    blocking: dict[str, None] = {}
    backends: dict[str, None] = {}
    for placeholder in gm.graph.find_nodes(op="placeholder"):
        if not is_mirror(str(placeholder.target)):
            continue
        for user in placeholder.users:
            backend, plans_before = owners.get(_packet(user.target), ("", False))
            if not plans_before and _packet(user.target) not in plan_ops:
                blocking[str(placeholder.target)] = None
                backends.update({backend: None} if backend else {})
    if blocking:
        yield _reads(name, tuple(sorted(blocking)), tuple(backends))


def _reads(name: str, mirrors: tuple[str, ...], backends: tuple[str, ...]) -> Obstacle:
    by = f" (attention backend {', '.join(backends)})" if backends else ""
    asks = "its placeholder asks for that mirror" if len(mirrors) == 1 else "its placeholders ask for those mirrors"
    return Obstacle(name, mirrors, f"{name}{by} reads {', '.join(mirrors)}: {asks}, and no graph can plan on the host")


def _packet(target: Any) -> Any:
    """An operator's packet, whichever overload a node calls; any other target itself."""
    return getattr(target, "overloadpacket", target)


def _descriptors_by_op() -> dict[Any, tuple[str, bool]]:
    """By cached op: its attention backend's name, and whether that plans before a capture."""
    registry = host.module("custom_ops.attention_interface").AttentionRegistry
    registered = getattr(registry, "_registry", None) or getattr(registry, "_attention_registry", {})
    found: dict[Any, tuple[str, bool]] = {}
    for name, descriptor in registered.items():
        found[_packet(descriptor.get_cached_attention_op())] = (name, _plans_before_capture(descriptor))
    return found


def _plans_before_capture(descriptor: Any) -> bool:
    says = getattr(descriptor, "plans_before_capture", None)
    if says is not None:
        return bool(says())
    prepares = getattr(descriptor, "get_host_prepare_metadata_function", None)
    return prepares is not None and prepares() is not None


def _plan_ops() -> Collection[Any]:
    """Packets of the ops that plan; only a host that captures consumers one by one has such ops."""
    try:
        return host.module("custom_ops.plan_ops").PLAN_OPS
    except ModuleNotFoundError:
        return ()


# -- the whole orchestrator --------------------------------------------------------------------------------------------


def obstacles_in_orchestrator(
    mod: nn.Module, cm: Any, orchestrator: str | None = None, interface_arg: str | None = None
) -> list[Obstacle]:
    """What keeps a whole orchestrator from being captured as one graph, for the batches that an engine captures.

    Everything that the orchestrator, as it will run, does for mirrors is in the way: a transfer, a wait for one, the
    host's own arithmetic, a mutation that copies, a host-prepare call, and whoever reads a mirror, because its plan
    would have to be made anew in the midst of the graph. So is a call of unknown effect.

    Raises:
        UntraceableError: the orchestrator cannot be traced, so nothing is known of what it does.
        OrchestratorError: it, or the parameter that receives the interface, cannot be found.
    """
    graphs = _captured_graphs(mod, cm, orchestrator, interface_arg)
    if not graphs:
        return obstacles_in_consumers(mod)
    setting, traits = Setting.of(cm), host_traits(cm)
    found: dict[Obstacle, None] = {}
    for gm in graphs.values():
        program = as_run(collect(gm, setting, interface_arg))
        mirroring = Mirroring(program, traits)
        for event in program.flat:
            found.update(dict.fromkeys(_of_event(event, program, mirroring)))
        found.update(dict.fromkeys(_host_prepare_calls(program)))
        found.update(dict.fromkeys(_python_effects(program)))
    return list(found)


def _captured_graphs(
    mod: nn.Module, cm: Any, orchestrator: str | None, interface_arg: str | None
) -> dict[str, GraphModule]:
    """The orchestrator's graphs for the batches that are captured; none where the model is no orchestrator."""
    owner = find_orchestrator(mod, orchestrator)
    if isinstance(owner, GraphModule):
        return {"graph": owner} if is_orchestrator_graph(owner) else {}
    rewritten = orchestrator_graphs(owner)
    length = draft_length(owner, cm)
    found: dict[str, GraphModule] = {}
    refused = []
    for kind in CAPTURED_KINDS:
        with preserved(cm):
            try:
                set_batch(cm, kind, length)
                fitting = [(name, gm) for name, gm in rewritten.items() if gm.guards(cm, owner)]
                name, gm = fitting[0] if fitting else (kind, None)
                found[name] = gm or trace_orchestrator(owner, cm, interface_arg=interface_arg, variant=kind)
            except ValueError as error:  # a batch that the interface is too small for
                refused.append(f"{kind}: {error}")
            except UntraceableError as error:
                if not isinstance(error.__cause__, AssertionError):
                    raise
                refused.append(f"{kind}: {error}")  # one that the wrapper does not take
    if not found:
        raise UntraceableError(f"{type(owner).__name__} takes none of the captured batches ({'; '.join(refused)})")
    return found


def _of_event(event: Event, program: Program, mirroring: Mirroring) -> Iterator[Obstacle]:
    table = program.table
    if event.kind is Kind.READ:
        mirrors = table.mirrors(event.reads)
        if not mirrors:
            return
        if event.node is not None and event.node.op == "call_module":
            yield _reads(event.name, mirrors, ())
        else:
            yield Obstacle(event.name, mirrors, f"{_place(event)} reads {', '.join(mirrors)} on the host")
    elif event.kind is Kind.UNKNOWN:
        yield Obstacle(event.name, (), f"{_place(event)} may do anything with host mirrors: {event.reason}")
    elif event.kind is Kind.REFRESH:
        mirrors = table.mirrors(event.freshens & table.all)
        yield Obstacle(event.name, mirrors, f"{_place(event)} brings {', '.join(mirrors)} to the host")
    elif event.kind is Kind.MUTATION and event.spec is not None:
        yield from _of_mutation(event, program, mirroring)


def _of_mutation(event: Event, program: Program, mirroring: Mirroring) -> Iterator[Obstacle]:
    override = override_in_graph(event)
    if event.spec is not None and event.spec.restages:
        yield Obstacle(event.name, (), f"{_place(event)} sets a new batch from host data")
    elif mirroring.under(event, override):
        mirrors = mirroring.purpose(event, override)
        whole = " (and with them the whole buffer)" if override is None else ""
        yield Obstacle(event.name, mirrors, f"{_place(event)} copies {', '.join(mirrors)} to the host{whole}")
    replayed = tuple(map(mirror_of, replays_in_graph(event)))
    if replayed:
        yield Obstacle(event.name, replayed, f"{_place(event)} has the host compute {', '.join(replayed)}")


def _host_prepare_calls(program: Program) -> Iterator[Obstacle]:
    """Calls of host-prepare functions, whatever these read."""
    info = program.setting.info
    if not getattr(info, "_active_host_prep_args", True):
        return
    for graph in program.owners:
        for node in graph.nodes:
            if _calls(node, _HOST_PREPARE):
                yield Obstacle(_HOST_PREPARE, (), f"{_HOST_PREPARE} (%{node.name}{_source(node)}) plans on the host")


def _python_effects(program: Program) -> Iterator[Obstacle]:
    """What the orchestrator does on the host for every batch, which a replay would leave out."""
    for graph in program.owners:
        for node in graph.nodes:
            if node.target is ops.call and _is_host_function(str(node.args[0])):
                yield Obstacle(str(node.args[0]), (), f"{node.args[0]} (%{node.name}{_source(node)}) runs on the host")
            elif node.target is ops.set_attribute:
                what = f"the assignment of {node.args[1]}"
                yield Obstacle(what, (), f"{what} (%{node.name}{_source(node)}) happens on the host")


def _is_host_function(name: str) -> bool:
    """Whether a function that is recorded by its name does something on the host; torch's own write tensors."""
    return not name.startswith("torch.") or name.startswith("torch.cuda.")


def _calls(node: Node, method: str) -> bool:
    if node.op == "call_method":
        return node.target == method
    return node.target is ops.invoke and node.args[1] == method


def _place(event: Event) -> str:
    return event.name if event.node is None else f"{event.name} (%{event.node.name}{_source(event.node)})"


def _source(node: Node) -> str:
    source = node.meta.get("source")
    return f", {source}" if source else ""


# -- what is said about them -------------------------------------------------------------------------------------------


def require_capturable(
    mod: nn.Module,
    cm: Any,
    backend: str,
    capture: str = "full",
    orchestrator: str | None = None,
    interface_arg: str | None = None,
) -> None:
    """Refuse a model of which something that is going to be captured contains what no device graph can contain.

    Args:
        mod: the model.
        cm: its interface.
        backend: the compile backend, for the message.
        capture: `consumers`: each consumer becomes a graph; `full`: the whole orchestrator does; `segments`: consumers
            with what the host is not needed for between them, which asks no more of the model than `consumers`.
        orchestrator: its qualified name; None: the model itself.
        interface_arg: the parameter that receives the interface, where neither annotation nor name tells.

    Raises:
        CaptureError: it names everything that is in the way, and what can be changed.
    """
    if capture != "full":
        obstacles = obstacles_in_consumers(mod)
    else:
        try:
            obstacles = obstacles_in_orchestrator(mod, cm, orchestrator, interface_arg)
        except UntraceableError as error:
            unknown = f"nobody can tell what the orchestrator does, because it cannot be traced: {error}"
            obstacles = [Obstacle("the orchestrator", (), unknown)]
    if obstacles:
        what = "the whole orchestrator" if capture == "full" else "each consumer"
        raise CaptureError(
            f"compile_backend {backend!r} with capture: {capture} makes {what} a device graph, which can contain no "
            f"transfer to the host, no wait of the host and no planning on it:\n{describe(obstacles)}\n"
            f"Change one of these:\n{_advice(mod, capture)}"
        )


def _advice(mod: nn.Module, capture: str) -> str:
    advice = [
        "attn_backend (draft_attn_backend for the drafter): a backend that reads no host mirror"
        + (", or one that plans before the capture" if capture != "full" else ""),
        f"compile_backend: {' or '.join(sorted(EAGER_BACKENDS))}, which capture nothing",
    ]
    if capture == "full":
        in_the_way = ", ".join(dict.fromkeys(o.where for o in obstacles_in_consumers(mod)))
        but = f" (but {in_the_way} cannot be captured with its present backend either)" if in_the_way else ""
        advice.insert(1, f"capture: consumers, so that the orchestrator runs outside of graphs{but}")
    return "\n".join(f"  * {line}" for line in advice)


def describe(obstacles: list[Obstacle]) -> str:
    """One line per obstacle."""
    return "\n".join(f"  * {obstacle.text}" for obstacle in obstacles)
