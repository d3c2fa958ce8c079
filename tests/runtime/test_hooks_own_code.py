"""Mirrors on demand for the wrapper's own code: reads of its own, unknown calls, and no consumer at all."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from auto_deploy_ext.analysis.program import UnknownEffectError
from auto_deploy_ext.rewriting.scoping import ScopeError, ScopeOptions, scope_module
from tests.orchestrator.wrappers import DRAFT_ARGS, consumer, interface, nest


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draft_model = consumer(*DRAFT_ARGS)

    def forward(self, csi: Any) -> list[int]:
        csi.info.switch_to_generate_()
        return csi.named_args["cu_seqlen_host"][:3].tolist()


class CallsUnknown(Reads):
    def forward(self, csi: Any) -> list[int]:
        csi.info.switch_to_generate_()
        csi.info.to("cpu")
        return []


def test_a_mirror_that_the_wrapper_itself_reads_is_up_to_date() -> None:
    wrapper, cm = Reads(), interface()
    scope_module(wrapper, cm, ScopeOptions(mode="hooks"))
    nest(cm, [], 2, 3)
    assert wrapper(cm) == [0, 1, 2]


def test_a_call_of_unknown_effect_is_refused_where_that_is_asked_for() -> None:
    wrapper, cm = CallsUnknown(), interface()
    scope_module(wrapper, cm, ScopeOptions(mode="hooks", on_unknown="error"))
    nest(cm, [], 2, 3)
    with pytest.raises(UnknownEffectError, match=r"to\(\) is not registered"):
        wrapper(cm)


def test_a_wrapper_without_consumers_is_refused_and_stays_as_it_is() -> None:
    wrapper = Reads()
    del wrapper.draft_model
    with pytest.raises(ScopeError, match="holds no GraphModule"):
        scope_module(wrapper, interface(), ScopeOptions(mode="hooks"))
    assert "forward" not in vars(wrapper)
