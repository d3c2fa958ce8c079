"""Guards: the conditions on the interface at entry under which a traced variant is the right one.

A guard is an expression over host state at entry. Where the orchestrator branches on host state that an earlier
effect of its own has changed (`batch_info` after `switch_to_generate_`), the guard repeats that effect on a shadow of
the interface, so nothing but the shadow is written.
"""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from . import ops
from .errors import UntraceableError, where_in_source

#: values that a guard expression may compare and that may be written into its source.
Scalar = (bool, int, float, str, type(None))

_STATIC_TENSOR_ATTRIBUTES = frozenset({"dtype", "device", "layout", "ndim", "is_cuda", "requires_grad"})
_STATIC_TENSOR_METHODS = frozenset({"dim", "is_floating_point", "ndimension", "element_size"})
#: how an operator is written in a guard's source.
_INFIX: dict[Any, str] = {
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.floordiv: "//",
    operator.truediv: "/",
    operator.mod: "%",
}

_PURE_PREFIXES = ("get_", "is_", "has_", "num_", "total_", "serialize", "keys", "values", "items")


def is_pure_method(name: str) -> bool:
    """Whether a method of an interface object is taken to read only, by its name."""
    return name == "get" or name.startswith(_PURE_PREFIXES)


def shadow(interface: Any) -> Any:
    """Return a shallow copy of `interface` whose `info.batch_info` is a copy that host effects may write."""
    twin = copy.copy(interface)
    info = copy.copy(interface.info)
    info.batch_info = type(info.batch_info)(info.batch_info.serialize().clone())
    twin.info = info
    return twin


def entry_signature(interface: Any) -> tuple[Any, ...]:
    """All host integers from which the shapes of an orchestrator's tensors follow: batch info and current lengths."""
    info = interface.info
    buffer = info._input_buffer
    lengths = tuple(int(buffer.get_current_length(name)) for name in buffer.tensor_names)
    return (*info.batch_info.serialize().tolist(), *lengths)


def argument_names(interface: Any) -> tuple[str, ...]:
    """The names of an interface's arguments: the active ones, and the extra ones that came with the batch."""
    info = interface.info
    extra = getattr(info, "_extra_args", None) or {}
    return (*info._active_args, *(name for name, value in extra.items() if value is not None))


@dataclass
class Guards:
    """A compiled conjunction of guards.

    Attributes:
        source: Python source of `guard(interface, owner) -> bool`; conditions stand in the order in which they arose.
        constants: what the source refers to by name.
        conditions: the conditions as text, for people.
    """

    source: str
    constants: dict[str, Any]
    conditions: tuple[str, ...]
    _function: Callable[[Any, Any], bool] | None = field(default=None, repr=False, compare=False)

    def __call__(self, interface: Any, owner: Any) -> bool:
        """Whether the variant fits the batch that `interface` holds now."""
        if self._function is None:
            namespace = dict(self.constants)
            exec(compile(self.source, "<guards>", "exec"), namespace)
            self._function = namespace["guard"]
        try:
            return self._function(interface, owner)
        except AttributeError:  # what was there when the variant was traced is gone
            return False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_function": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Guards:
        return Guards(self.source, self.constants, self.conditions)


class GuardBuilder:
    """Collects guards while an orchestrator is traced.

    Args:
        values: the value that each node had in the example batch.
        phases: how many host effects had happened when each node was recorded.
        signature: the `entry_signature` of the example batch.
        names: its `argument_names`.
    """

    def __init__(
        self,
        values: Mapping[Node, Any],
        phases: Mapping[Node, int],
        signature: tuple[Any, ...],
        names: tuple[str, ...],
    ) -> None:
        self._values = values
        self._signature = signature
        self._names_at_entry = names
        self._phases = phases
        self._effects: list[tuple[Node, Callable[[Any], None] | None]] = []
        self._opaque: tuple[int, str] | None = None
        self._lines: list[str] = []
        self._conditions: list[str] = []
        self._names: dict[Any, str] = {}
        self._texts: dict[str, str] = {}
        self._constants: dict[str, Any] = {}
        self._constant_names: dict[int, str] = {}
        self._shadows = 0
        self._seen: set[Any] = set()
        self._tensor_memo: dict[Node, bool] = {}

    # -- effects -----------------------------------------------------------------------------------------------

    @property
    def phase(self) -> int:
        """How many host effects have happened so far."""
        return len(self._effects)

    def host_effect(self, node: Node, effect: Callable[[Any], None] | None = None) -> None:
        """Note that `node` changed host state: `effect(info)` repeats it, None: the node's own call does."""
        self._effects.append((node, effect))

    def opaque_effect(self, node: Node, what: str) -> None:
        """Note that `node` may have changed host state in a way no guard can repeat."""
        if self._opaque is None:
            self._opaque = (self.phase + 1, f"{what}, whose effect on host state is not known")
        self._effects.append((node, None))

    # -- conditions --------------------------------------------------------------------------------------------

    def require_truth(self, node: Node, expected: bool) -> None:
        """Guard that `bool(node)` is `expected`."""
        self._require(node, lambda text: text if expected else f"not {text}")

    def require_equal(self, node: Node, expected: Any) -> None:
        """Guard that `node` equals `expected`, the value it had."""
        constant = self._constant(expected)
        operation = "is" if expected is None else "=="
        self._require(node, lambda text: f"{text} {operation} {constant}")

    def require_length(self, node: Node, expected: int) -> None:
        """Guard that `len(node)` is `expected`."""
        self._require(node, lambda text: f"len({text}) == {expected}")

    def require_type(self, node: Node, expected: type) -> None:
        """Guard that `type(node)` is `expected`."""
        constant = self._constant(expected)
        self._require(node, lambda text: f"type({text}) is {constant}")

    def require_generate_only(self, expected: bool) -> None:
        """Guard that the batch is generate-only at entry, or that it is not."""
        self._add(("" if expected else "not ") + "interface.info.batch_info.is_generate_only()")

    def require_present(self, node: Node) -> None:
        """Guard that an attribute of the interface's objects is something, as it was."""
        if not self._is_static(node) and not self._depends_on_tensor(node):
            self._add(f"{self._expression(node, self.phase)} is not None")

    def require_missing(self, node: Node, name: str) -> None:
        """Guard that an object of the interface has no attribute `name`."""
        self._add(f"not hasattr({self._expression(node, self.phase)}, {name!r})")

    def require_same_names(self) -> None:
        """Guard that the interface has the same arguments, extra ones of a batch included."""
        expected = self._names_at_entry
        self._add(f"{self._constant(argument_names)}(interface) == {expected!r}")

    def require_none_or_not(self, path: str, value: Any) -> None:
        """Guard that an attribute that is read at run time is None where it was, and something where it was."""
        self._add(f"owner.{path} is {'' if value is None else 'not '}None")

    def require_module(self, path: str, module: Any) -> None:
        """Guard that a submodule that was traced through is of the same class still."""
        place = f"owner.get_submodule({path!r})"
        self._add(f"type({place}) is {self._constant(self._class_of(module))}")

    @staticmethod
    def _class_of(module: Any) -> type:
        watched = type(module)
        return watched.__mro__[1] if "__traced__" in vars(watched) else watched

    def require_attribute(self, path: str, expected: Any) -> None:
        """Guard that the wrapper's attribute `path` (dotted) equals `expected`."""
        # A copy: the guard must not follow the wrapper's own list.
        expected = expected.copy() if isinstance(expected, list) else expected
        self._add(f"owner.{path} == {self._constant(expected)}" if expected is not None else f"owner.{path} is None")

    def _require(self, node: Node, condition: Callable[[str], str]) -> None:
        if self._is_static(node):
            self._require_own_tensors(node)
            tensor_device = next((v.device for v in self._tensors_below(node)), None)
            if tensor_device is not None:
                self._add(f"interface.device == {self._constant(tensor_device)}")
            return
        if self._depends_on_tensor(node):
            self._require_signature()
            self._require_own_tensors(node)
            return
        self._add(condition(self._expression(node, self.phase)))

    def _require_own_tensors(self, node: Node) -> None:
        """Guard the shapes of the wrapper's own tensors that a condition depends on."""
        for source in (node, *node.all_input_nodes):
            value: Any = self._values.get(source)
            own = source.op == "get_attr" or (source.target is getattr and _is_owner(source.args[0]))
            if own and _is_tensor(value):
                text = self._own_tensor(source)
                self._add(
                    f"tuple({text}.shape) == {tuple(value.shape)!r} and {text}.dtype is {self._constant(value.dtype)}"
                )
            elif source is not node:
                self._require_own_tensors(source)

    @staticmethod
    def _own_tensor(node: Node) -> str:
        path = str(node.target) if node.op == "get_attr" else str(node.args[1])
        module, _, name = path.rpartition(".")
        return f"owner.get_submodule({module!r}).{name}" if module else f"owner.{name}"

    def _require_signature(self) -> None:
        self._add(f"{self._constant(entry_signature)}(interface) == {self._signature!r}")

    def _add(self, condition: str) -> None:
        if condition not in self._seen:
            self._seen.add(condition)
            self._lines.append(f"    if not ({condition}):\n        return False")
            self._conditions.append(self._readable(condition))

    def _readable(self, text: str) -> str:
        """Put its expression in the place of each of the source's variables, in parentheses inside another one."""

        def expression(match: re.Match[str]) -> str:
            inner = self._readable(self._texts[match.group()])
            return f"({inner})" if " " in inner and match.group() != text else inner

        return re.sub(r"\bv\d+\b", expression, text)

    # -- expressions -------------------------------------------------------------------------------------------

    def _is_host_data(self, node: Node) -> bool:
        """Whether a node's value is plain data, which keeps the value of the phase in which it was read."""
        value = self._values.get(node)
        return isinstance(value, Scalar) or (
            isinstance(value, (tuple, list)) and all(isinstance(v, Scalar) for v in value)
        )

    def _is_static(self, node: Node) -> bool:
        """Whether a node is made of dtypes, devices and ranks of tensors only, the same for every batch."""
        if node.op == "placeholder":
            return False
        of_tensor = bool(node.args) and isinstance(node.args[0], Node) and _is_tensor(self._values.get(node.args[0]))
        if of_tensor and node.target is getattr:
            return node.args[1] in _STATIC_TENSOR_ATTRIBUTES
        if of_tensor and node.op == "call_method":
            return node.target in _STATIC_TENSOR_METHODS
        inputs = node.all_input_nodes
        return bool(inputs) and all(self._is_static(n) for n in inputs)

    def _tensors_below(self, node: Node) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for source in node.all_input_nodes:
            value: Any = self._values.get(source)
            found += [value] if _is_tensor(value) else self._tensors_below(source)
        return found

    def _depends_on_tensor(self, node: Node) -> bool:
        if node not in self._tensor_memo:
            self._tensor_memo[node] = _is_tensor(self._values.get(node)) or any(
                self._depends_on_tensor(n) for n in node.all_input_nodes
            )
        return self._tensor_memo[node]

    def _interface_at(self, phase: int) -> str:
        if self._opaque is not None and phase >= self._opaque[0]:
            raise UntraceableError(f"branches on host state after {self._opaque[1]}", where_in_source())
        while self._shadows < phase:
            node, effect = self._effects[self._shadows]
            before = self._interface_at(self._shadows)
            self._shadows += 1
            now = f"interface_{self._shadows}"
            self._lines.append(f"    {now} = {self._constant(shadow)}({before})")
            self._names[("interface", self._shadows)] = now
            self._emit_effect(node, effect, self._shadows)
        return "interface" if phase == 0 else f"interface_{phase}"

    def _emit_effect(self, node: Node, effect: Callable[[Any], None] | None, phase: int) -> None:
        if effect is not None:
            info, _, *operands = node.args
            host_operands = tuple(None if self._is_device_operand(o) else o for o in operands)
            self._lines.append(f"    {self._constant(effect)}({self._arguments((info, *host_operands), {}, phase)})")
        elif node.target is ops.setitem:
            obj, index, value = (self._argument(a, phase) for a in node.args)
            self._lines.append(f"    {obj}[{index}] = {value}")
        elif node.target is ops.call_inplace:
            tensor, method, *args = node.args
            self._lines.append(
                f"    {self._argument(tensor, phase)}.{method}({self._arguments(tuple(args), node.kwargs, phase)})"
            )
        else:
            self._lines.append(f"    {self._call_text(node, phase)}")

    def _is_device_operand(self, operand: Any) -> bool:
        return isinstance(operand, Node) and self._depends_on_tensor(operand)

    def _expression(self, node: Node, phase: int) -> str:
        if node.op == "placeholder":
            return self._interface_at(phase)
        if node.op == "get_attr" and node.target == "owner":
            return "owner"
        self._check_repeatable(node)
        if self._is_host_data(node):
            phase = self._phases[node]
        text = self._call_text(node, phase)
        if text not in self._names:
            name = self._names[text] = f"v{len(self._names)}"
            self._texts[name] = text
            self._lines.append(f"    {name} = {text}")
        return self._names[text]

    def _call_text(self, node: Node, phase: int) -> str:
        if node.op == "call_function" and node.target is getattr:
            return f"{self._argument(node.args[0], phase)}.{node.args[1]}"
        if node.op == "call_function" and node.target is operator.getitem:
            return f"{self._argument(node.args[0], phase)}[{self._argument(node.args[1], phase)}]"
        if node.target is ops.invoke or node.op == "call_method":
            receiver, name, args = (
                (node.args[0], node.args[1], node.args[2:])
                if node.target is ops.invoke
                else (node.args[0], node.target, node.args[1:])
            )
            return f"{self._argument(receiver, phase)}.{name}({self._arguments(args, node.kwargs, phase)})"
        function = node.target
        if node.op == "call_function" and function in _INFIX:
            left, right = (self._argument(a, phase) for a in node.args)
            return f"{left} {_INFIX[function]} {right}"
        if (
            node.op == "call_function"
            and callable(function)
            and function.__module__ in ("_operator", "builtins", "math")
        ):
            return f"{self._constant(function)}({self._arguments(node.args, node.kwargs, phase)})"
        raise UntraceableError(
            f"branches on the result of {node.format_node()}, which no guard can repeat", where_in_source()
        )

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], phase: int) -> str:
        texts = [self._argument(a, phase) for a in args]
        texts += [f"{k}={self._argument(v, phase)}" for k, v in kwargs.items()]
        return ", ".join(texts)

    def _argument(self, value: Any, phase: int) -> str:
        if isinstance(value, Node):
            return self._expression(value, phase)
        if isinstance(value, (tuple, list)):
            inner = ", ".join(self._argument(v, phase) for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if isinstance(value, slice):
            parts = (self._argument(v, phase) for v in (value.start, value.stop, value.step))
            return f"slice({', '.join(parts)})"
        return self._constant(value)

    def _check_repeatable(self, node: Node) -> None:
        if node.target is not ops.invoke:
            return
        name = str(node.args[1])
        if not is_pure_method(name):
            raise UntraceableError(
                f"branches on the result of {name}(), which is not known to be free of effects", where_in_source()
            )

    def _constant(self, value: Any) -> str:
        if isinstance(value, (bool, int, str, type(None))) or (
            isinstance(value, (tuple, list)) and all(isinstance(v, (bool, int, str, type(None))) for v in value)
        ):
            return repr(value)
        key = id(value)
        if key not in self._constant_names:
            name = f"c{len(self._constants)}_{getattr(value, '__name__', type(value).__name__)}".replace(
                "<", ""
            ).replace(">", "")
            self._constant_names[key] = name
            self._constants[name] = value
        return self._constant_names[key]

    def build(self) -> Guards:
        """Return the guards collected so far."""
        body = "\n".join([*self._lines, "    return True"])
        return Guards(f"def guard(interface, owner):\n{body}\n", dict(self._constants), tuple(self._conditions))


def _is_owner(value: Any) -> bool:
    return isinstance(value, Node) and value.op == "get_attr" and value.target == "owner"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and isinstance(value, torch._subclasses.fake_tensor.FakeTensor)
