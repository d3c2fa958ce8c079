"""Finding the orchestrator, the parameter that receives the interface, and the draft length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from auto_deploy_ext import CachedSequenceInterface
from auto_deploy_ext.orchestrator import OrchestratorError, draft_length, find_interface_arg, find_orchestrator
from auto_deploy_ext.orchestrator.example_batches import set_batch

from .wrappers import DraftLoop, interface


def annotated(first: int, batch: CachedSequenceInterface | None = None, csi: Any = None) -> None: ...
def named(first: int, cm: Any, csi: Any) -> None: ...
def only(anything: Any, **kwargs: Any) -> None: ...
def neither(first: Any, second: Any) -> None: ...


def test_the_interface_parameter_is_found_in_the_documented_order() -> None:
    assert find_interface_arg(annotated) == "batch"
    assert find_interface_arg(named) == "csi"
    assert find_interface_arg(only) == "anything"
    assert find_interface_arg(neither, "second") == "second"


def test_an_ambiguous_or_wrong_parameter_is_an_error_that_says_what_to_write() -> None:
    with pytest.raises(OrchestratorError, match=r"first, second.*interface_arg:"):
        find_interface_arg(neither)
    with pytest.raises(OrchestratorError, match="no parameter 'third'; it has first, second"):
        find_interface_arg(neither, "third")


def test_an_orchestrator_is_found_by_name_with_a_suggestion_when_it_is_misspelled() -> None:
    model = nn.Module()
    model.engine = nn.Module()
    model.engine.wrapper = DraftLoop()
    assert find_orchestrator(model) is model
    assert find_orchestrator(model, "engine.wrapper") is model.engine.wrapper
    with pytest.raises(OrchestratorError, match=r"no submodule 'engine.wraper'; did you mean 'engine.wrapper'\?"):
        find_orchestrator(model, "engine.wraper")


def test_the_draft_length_comes_from_the_config_then_the_wrapper_then_the_interface() -> None:
    cm = SimpleNamespace(spec_config=SimpleNamespace(max_draft_len=5))
    assert draft_length(DraftLoop(2), cm, 4) == 4
    assert draft_length(DraftLoop(2), cm) == 2
    assert draft_length(nn.Module(), cm) == 5
    assert draft_length(nn.Module(), SimpleNamespace()) == 1


@pytest.mark.parametrize(
    ("kind", "batch_info"),
    [
        ("prefill", [2, 8, 0, 0, 0, 0]),
        ("extend", [0, 0, 2, 8, 0, 0]),
        ("mixed", [2, 8, 2, 8, 0, 0]),
        ("decode", [0, 0, 0, 0, 2, 2]),
    ],
)
def test_example_batches_are_of_their_kind(kind: str, batch_info: list[int]) -> None:
    cm = interface()
    set_batch(cm, kind, 3)
    assert cm.info.batch_info.serialize().tolist()[:6] == batch_info


def test_an_example_batch_that_does_not_fit_says_so() -> None:
    cm = interface(max_batch_size=1)
    with pytest.raises(ValueError, match="mixed batch needs two rows"):
        set_batch(cm, "mixed", 3)
    with pytest.raises(ValueError, match="exceeds max_num_tokens=64"):
        set_batch(interface(), "extend", 60)
