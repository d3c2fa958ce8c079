"""The optimizer sorts by stage, keeps the config's order inside a stage, and hands the model from one to the next."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from torch import nn

from auto_deploy_ext.embedded.transform.interface import (
    BaseTransform,
    Stages,
    TransformConfig,
    TransformInfo,
    TransformRegistry,
)
from auto_deploy_ext.embedded.transform.optimizer import InferenceOptimizer


class Note(BaseTransform):
    """Appends what it was called with to the model, which the first one builds."""

    def _apply_to_full_model(self, mod, cm, factory, shared_config):
        if mod is None:
            mod = nn.Module()
            mod.seen = []
        mod.seen = [*mod.seen, (self.get_transform_key(), cm, factory, shared_config.world_size)]
        return mod, TransformInfo(skipped=False, num_matches=1)


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    monkeypatch.setattr(TransformRegistry, "_registry", {})
    for key in ("build_model", "initialize_cache", "annotate", "scope", "compile_model"):
        TransformRegistry.register(key)(type(f"Note_{key}", (Note,), {}))


def config(*items: tuple[str, str]) -> dict[str, dict[str, object]]:
    return {key: {"stage": stage, "run_per_gm": False} for key, stage in items}


def test_stages_are_sorted_and_ties_keep_the_order_of_the_config():
    optimizer = InferenceOptimizer(
        None,
        config(
            ("compile_model", "compile"),
            ("initialize_cache", "cache_init"),
            ("build_model", "factory"),
            ("scope", "cache_init"),
            ("annotate", "cache_init"),
        ),
    )
    assert list(optimizer.config) == ["build_model", "initialize_cache", "scope", "annotate", "compile_model"]


def test_each_transform_gets_interface_and_factory_and_passes_the_model_on():
    optimizer = InferenceOptimizer("factory", config(("scope", "cache_init"), ("build_model", "factory")))
    mod = optimizer("interface")
    assert mod.seen == [("build_model", "interface", "factory", 1), ("scope", "interface", "factory", 1)]
    assert list(mod.meta["_autodeploy"]["transform_history"]) == ["build_model", "scope"]


def test_a_model_can_be_given():
    mod = nn.Module()
    mod.seen = []
    assert InferenceOptimizer(None, config(("scope", "cache_init")))(None, mod) is mod


def test_a_config_object_is_taken_as_it_is():
    given = TransformConfig(stage="compile", run_per_gm=False)
    assert InferenceOptimizer(None, {"scope": given}).config["scope"] is given


def test_fields_become_the_transforms_config():
    optimizer = InferenceOptimizer(None, config(("scope", "cache_init")))
    assert optimizer.config["scope"].stage is Stages.CACHE_INIT
    with pytest.raises(ValidationError, match="stage"):
        InferenceOptimizer(None, {"scope": {}})


def test_an_unknown_key_is_a_key_error_with_a_suggestion():
    with pytest.raises(KeyError, match=r"unknown transform 'anotate'; did you mean 'annotate'\?"):
        InferenceOptimizer(None, config(("anotate", "cache_init")))
