"""The plugin inside a host's own pipeline and worker processes; test_hosts runs this for other hosts too."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import auto_deploy_ext
from auto_deploy_ext import InferenceOptimizer, TransformRegistry, host, orchestrator_graphs
from auto_deploy_ext.module_dir import module_dir
from tests.wrappers import worker

from .harness import make_interface, reference, same, scoped, step, transform
from .library import Eagle, HandNarrowed, Mtp, ThroughHelpers

CONFIGS = Path(__file__).parents[2] / "configs" / "plugin"
OWN_KEYS = ("annotate_active_args", "scope_host_mirrors")

#: how AutoDeploy's own config ends.
DEFAULT = {
    "initialize_cache": {"stage": "cache_init", "run_per_gm": False},
    "resize_kv_cache": {"stage": "cache_init", "run_per_gm": False},
    "compile_model": {"stage": "compile", "run_per_gm": False},
}


def plugin_config(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["transforms"]


#: what each host has; a double's version says which release it stands for.
FEATURES = {
    "embedded": {"active_args_override", "window_groups", "pages_per_pool", "transform_idx", "exact_copies"},
    "0.0.0+double": {"active_args_override", "window_groups", "pages_per_pool", "transform_idx"},
    "0.0.1+double": {"window_groups", "pages_per_pool"},
    "0.0.2+double": set(),
}


def test_features_are_told_from_signatures() -> None:
    expected = FEATURES["embedded" if host.name == "embedded" else host.version]
    assert {name for name, has in host.features.items() if has} == expected


@pytest.mark.parametrize(("name", "kind"), [("eagle3", Eagle), ("mtp", Mtp)])
def test_the_hosts_optimizer_takes_the_plugins_config_as_it_is(name: str, kind: Any) -> None:
    assert set(plugin_config(name)) <= {
        "annotate_active_args",
        "check_capture",
        "drain_hostfuncs",
        "scope_host_mirrors",
    }
    for key in DEFAULT:
        with contextlib.suppress(ModuleNotFoundError):  # imports of a host's optimizer may have registered it
            host.module(f"transform.library.{key}")
    wrapper, cm = kind(), make_interface(3)
    assert InferenceOptimizer(None, {**DEFAULT, **plugin_config(name)})(cm, wrapper) is wrapper
    history = [key for key in wrapper.meta["_autodeploy"]["transform_history"] if key != "check_capture"]
    assert history == ["initialize_cache", "resize_kv_cache", *OWN_KEYS, "compile_model"]
    expected, got = reference(kind, [3, 4], 2), step(wrapper, cm, [3, 4], 2)
    assert same(got.output, expected.output)
    assert got.reads == expected.reads


@pytest.mark.parametrize(
    ("kind", "strategy"), [(Eagle, "override"), (HandNarrowed, "auto"), (ThroughHelpers, "auto"), (Mtp, "auto")]
)
def test_fusing_changes_no_step_where_the_host_allows_it_and_else_nothing(kind: Any, strategy: str) -> None:
    wrapper, cm = scoped(kind, mode="graph", strategy=strategy)
    before = [step(wrapper, cm, *batch) for batch in (([], 2), ([3, 4], 2))]
    code = [gm.code for gm in orchestrator_graphs(wrapper).values()]
    transform("fuse_metadata_mutations", wrapper, cm)
    info = wrapper.meta["_autodeploy"]["transform_history"]["fuse_metadata_mutations"]
    ours = host.name == "embedded"
    assert (info.skipped, info.num_matches > 0) == (not ours, ours)
    assert ours or [gm.code for gm in orchestrator_graphs(wrapper).values()] == code
    for batch, expected in zip((([], 2), ([3, 4], 2)), before, strict=True):
        got = step(wrapper, cm, *batch)
        assert same(got.output, expected.output)
        assert got.reads == expected.reads
        assert [(t.names, t.nbytes) for t in got.transfers] == [(t.names, t.nbytes) for t in expected.transfers]


def test_only_the_plugins_own_keys_are_in_the_hosts_registry() -> None:
    known = TransformRegistry._registry
    ours = {key for key, kind in known.items() if kind.__module__.startswith("auto_deploy_ext.transforms")}
    assert ours >= set(OWN_KEYS)
    others = {kind.__module__ for key, kind in known.items() if key not in ours}
    # Other tests of the same process register transforms of their own.
    others = {module for module in others if not module.partition(".")[0].startswith("test")}
    assert all(module.startswith(host.root) for module in others)


def test_importing_the_directory_as_a_custom_module_registers_once() -> None:
    """What `--custom_module_dirs` does, and then again."""
    program = """
import importlib, pathlib, subprocess, sys
printed = subprocess.run(
    [sys.executable, "-m", "auto_deploy_ext.module_dir"], check=True, capture_output=True, text=True
).stdout.splitlines()[-1]
directory = pathlib.Path(printed)
sys.path.insert(0, str(directory.parent))
package = importlib.import_module(directory.name)
first = package.TransformRegistry.get("scope_host_mirrors")
importlib.reload(package)
importlib.reload(sys.modules["auto_deploy_ext.transforms.scope_host_mirrors"])
for name in [n for n in sys.modules if n.startswith("auto_deploy_ext.transforms")]:
    del sys.modules[name]
importlib.import_module("auto_deploy_ext.transforms")
second = package.TransformRegistry.get("scope_host_mirrors")
assert second.__qualname__ == first.__qualname__ and "transformers" not in sys.modules
print(package.host.name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.split() == [host.name]
    assert module_dir().name == "auto_deploy_ext"


def test_spawned_workers_register_and_agree(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(worker.work, args=(str(tmp_path),), nprocs=2)
    first, second = ((tmp_path / str(rank)).read_text() for rank in range(2))
    assert first == second
    assert '"mode": "graph"' in first


def test_the_public_classes_are_the_hosts_own() -> None:
    for name in ("BaseTransform", "CachedSequenceInterface", "InferenceOptimizer", "SequenceInfo", "Stages"):
        assert getattr(auto_deploy_ext, name).__module__.startswith(host.root)
