"""Notices that a consumer takes arguments which it did not take when mirrors were planned for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.fx import GraphModule

from auto_deploy_ext.active_args import META_KEY, annotated_args, module_at, placeholder_names, wrapped_graph

#: attribute of an orchestrator graph that holds its check.
_ATTRIBUTE = "_consumer_check"


class ChangedConsumerError(RuntimeError):
    """A consumer takes an argument that was added after mirrors were planned: it might read a stale one."""


class ConsumerCheck:
    """Compares consumers with what was planned for, when they are first called and again when they change.

    A call costs one lookup and three comparisons of identity per consumer: the module found under the path, the
    GraphModule that it is or wraps, and that one's generated code, which FX makes anew when a graph is recompiled.

    Args:
        expected: qualified name of each consumer -> sorted names of its arguments.
    """

    def __init__(self, expected: Mapping[str, tuple[str, ...]]) -> None:
        self.expected = dict(expected)
        self._seen: dict[str, tuple[Any, Any, Any]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ConsumerCheck:
        return ConsumerCheck(self.expected)

    def __reduce__(self) -> tuple[Any, ...]:
        return ConsumerCheck, (self.expected,)

    def __call__(self, root: nn.Module) -> None:
        """Check the consumers below `root`.

        Raises:
            ChangedConsumerError: one takes an argument that it did not take.
        """
        for path, names in self.expected.items():
            module = module_at(root, path)
            seen = self._seen.get(path)
            if seen is not None and seen[0] is module and (seen[1] is None or seen[1]._code is seen[2]):
                continue
            graph = wrapped_graph(module)
            _compare(path, names, module, graph)
            self._seen[path] = (module, graph, None if graph is None else graph._code)


def _compare(path: str, expected: tuple[str, ...], module: nn.Module, graph: GraphModule | None) -> None:
    # A compiled callable that keeps neither graph nor annotation cannot have been given a new placeholder.
    present = annotated_args(module) if graph is None else placeholder_names(graph)
    added = sorted(set(present or ()).difference(expected))
    if added:
        raise ChangedConsumerError(
            f"{path} takes {', '.join(added)}, which it did not take when its mirrors were planned: run "
            "annotate_active_args and scope_host_mirrors after the transform that added it"
        )


def check_graph(gm: GraphModule, root: nn.Module | None = None) -> None:
    """Check the consumers that an orchestrator graph calls; `root` is where their names are looked up."""
    check = gm.__dict__.get(_ATTRIBUTE)
    if check is None:
        calls = [n for n in gm.graph.nodes if n.op == "call_module" and META_KEY in n.meta]
        check = gm.__dict__[_ATTRIBUTE] = ConsumerCheck({str(n.target): tuple(n.meta[META_KEY]) for n in calls})
    check(root or gm)


def check_before_call(gm: nn.Module, args: tuple[Any, ...]) -> None:
    """The same as a forward pre-hook of an orchestrator that is a GraphModule itself."""
    assert isinstance(gm, GraphModule)
    check_graph(gm)


def check_when_called(gm: GraphModule) -> None:
    """Have an orchestrator graph checked whenever it is called; doing it again after a rewrite starts afresh."""
    gm.__dict__.pop(_ATTRIBUTE, None)
    if check_before_call not in gm._forward_pre_hooks.values():
        gm.register_forward_pre_hook(check_before_call)
