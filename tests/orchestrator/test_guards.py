"""Guards refuse every batch and every wrapper on which the traced branch would be the wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from auto_deploy_ext import trace_orchestrator
from auto_deploy_ext.orchestrator import UntraceableError, ops

from .wrappers import example, interface, nest


class Scaled(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Wrapper(nn.Module):
    def __init__(self, forward: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4))
        self.scales = [0.5, 1.0]
        self.previous: Any = None
        self.sampler: nn.Module = Scaled(3)
        self._run = [forward]

    def forward(self, csi: Any) -> Any:
        return self._run[0](self, csi)


def add_image(cm: Any, wrapper: Any) -> None:
    cm.info._store_extra_args({"pixel_values": torch.ones(2, 3)})


def add_attribute(cm: Any, wrapper: Any) -> None:
    cm.lora = 1


def remove_attribute(cm: Any, wrapper: Any) -> None:
    cm.spec_config = None


def shrink_table(cm: Any, wrapper: Any) -> None:
    wrapper.table = torch.zeros(1)


def change_scale(cm: Any, wrapper: Any) -> None:
    wrapper.scales[0] = 0.0


def replace_sampler(cm: Any, wrapper: Any) -> None:
    wrapper.sampler = Plain()


@pytest.mark.parametrize(
    ("forward", "change"),
    [
        (lambda s, csi: 1 if "pixel_values" in csi.named_args else 2, add_image),
        (lambda s, csi: 1 if csi.named_args.get("pixel_values") is not None else 2, add_image),
        (lambda s, csi: 1 if getattr(csi, "lora", None) else 2, add_attribute),
        (lambda s, csi: 1 if hasattr(csi, "lora") else 2, add_attribute),
        (lambda s, csi: 1 if csi.spec_config is not None else 2, remove_attribute),
        (lambda s, csi: 1 if s.table.shape[0] > 2 else 2, shrink_table),
        (lambda s, csi: 1 if s.scales[0] > 0 else 2, change_scale),
        (lambda s, csi: s.sampler(csi.get_arg("input_pos")), replace_sampler),
    ],
)
def test_what_decided_a_branch_is_guarded(forward: Any, change: Callable[[Any, Any], None]) -> None:
    wrapper, cm = Wrapper(forward), interface()
    nest(cm, [], 2, 3)
    graph = trace_orchestrator(wrapper, cm)
    assert graph.guards(cm, wrapper)
    change(cm, wrapper)
    assert not graph.guards(cm, wrapper)


def test_an_attribute_that_the_forward_assigns_is_guarded_to_be_something() -> None:
    def remember(self: Any, csi: Any) -> Any:
        found = self.previous is not None
        self.previous = csi.get_arg("input_pos").sum()
        return found

    wrapper, cm = Wrapper(remember), example("extend")
    first = trace_orchestrator(wrapper, cm)
    assert first.guards(cm, wrapper)
    assert first(cm) is False
    assert not first.guards(cm, wrapper)
    second = trace_orchestrator(wrapper, cm)
    assert second(cm) is True
    wrapper.previous = None
    assert not second.guards(cm, wrapper)


def test_assignments_to_the_interface_happen_at_run_time() -> None:
    def assign(self: Any, csi: Any) -> Any:
        csi.steps = 7
        return csi.get_arg("input_pos")

    wrapper, cm = Wrapper(assign), example("extend")
    graph = trace_orchestrator(wrapper, cm)
    assert not hasattr(cm, "steps")
    graph(cm)
    assert cm.steps == 7


def test_keywords_may_be_called_like_the_effects_own_parameters() -> None:
    def copy(self: Any, csi: Any) -> Any:
        csi.info.copy_(name="input_pos", src=torch.ones(2, dtype=torch.int32))
        return csi.info.get_arg(name="input_pos")

    cm = example("extend")
    assert trace_orchestrator(Wrapper(copy), cm)(cm)[:2].tolist() == [1, 1]


def test_a_positional_override_is_an_override() -> None:
    def switch(self: Any, csi: Any) -> Any:
        csi.info.switch_to_generate_({"cu_seqlen_host"})
        return None

    graph = trace_orchestrator(Wrapper(switch), example("extend"))
    node = next(n for n in graph.graph.nodes if n.target is ops.mutate)
    assert node.kwargs["active_args"] == ("cu_seqlen_host",)
    assert len(node.args) == 2


def test_an_in_place_function_that_no_name_leads_to_is_refused() -> None:
    def packet(self: Any, csi: Any) -> Any:
        total = torch.zeros(2)
        torch.ops.aten.add_(total, 1)
        return total

    with pytest.raises(UntraceableError, match="writes its argument"):
        trace_orchestrator(Wrapper(packet), example("extend"))


def test_an_interface_that_was_made_in_inference_mode_can_be_traced() -> None:
    def switch(self: Any, csi: Any) -> Any:
        csi.info.switch_to_generate_()
        return csi.get_arg("input_pos") + 0

    with torch.inference_mode():
        cm = example("extend")
    before = cm.get_arg("input_pos").tolist()
    graph = trace_orchestrator(Wrapper(switch), cm)
    assert cm.get_arg("input_pos").tolist() == before
    with torch.inference_mode():
        assert graph(cm)[:2].tolist() == [7, 7]


def test_a_batch_that_the_wrapper_asserts_away_is_named() -> None:
    def picky(self: Any, csi: Any) -> Any:
        assert csi.info.batch_info.get_num_sequences()[2] == 0, "there are no decode rows"
        return None

    batch = "the interface holds a batch of 0 prefill, 0 extend and 2 decode rows"
    with pytest.raises(UntraceableError, match=f"(?s)no decode rows.*; {batch}.*set_batch"):
        trace_orchestrator(Wrapper(picky), example("decode"))
