"""On a GPU: wrappers that moved there read what they should, and both hazards of a shared staging area are excluded.

The same on doubles of AutoDeploy, in processes of their own: there staging area and mirrors are the same memory.
"""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from auto_deploy_ext import host, record_mirrors
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.rewriting.strategies import STRATEGIES
from auto_deploy_ext.runtime import host_mirrors
from tests.double.tree import plant
from tests.wrappers.harness import make_interface, nest, reference, same, scoped, step
from tests.wrappers.library import Eagle, Mtp, StopsOnMirror, TwoDrafters

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROOT = Path(__file__).parents[2]
#: about a tenth of a second of a GPU's time.
LONG = 200_000_000


def check(wrapper: Any, kind: Any, cm: Any) -> None:
    for prefill, extend in (([], 2), ([3, 4], 2)):
        expected, got = reference(kind, prefill, extend), step(wrapper, cm, prefill, extend)
        assert same(got.output, expected.output)
        assert got.reads == expected.reads


@pytest.mark.parametrize("kind", [Eagle, Mtp, TwoDrafters])
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_rewritten_wrappers_read_on_a_gpu_what_they_read_on_the_cpu(kind: Any, strategy: str) -> None:
    wrapper, cm = scoped(kind, "cuda", mode="graph", strategy=strategy)
    check(wrapper, kind, cm)


@pytest.mark.parametrize("kind", [Eagle, StopsOnMirror])
def test_mirrors_on_demand_on_a_gpu(kind: Any) -> None:
    wrapper, cm = scoped(kind, "cuda", mode="hooks")
    check(wrapper, kind, cm)


@pytest.mark.parametrize("mode", ["graph", "hooks"])
def test_a_wrapper_that_was_rewritten_on_the_cpu_runs_on_a_gpu(mode: str) -> None:
    wrapper, _ = scoped(Eagle, mode=mode)
    for moved in (wrapper.to("cuda"), copy.deepcopy(wrapper).to("cuda"), pickle.loads(pickle.dumps(wrapper))):
        check(moved, Eagle, make_interface(3, "cuda"))


@pytest.fixture
def cm() -> Any:
    cm = make_interface(3, "cuda")
    host_mirrors.mirrors_of(cm)
    nest(cm, [], 2, 3)
    torch.cuda.synchronize()
    return cm


def test_what_is_in_flight_does_not_overwrite_the_next_batch(cm: Any) -> None:
    """Hazard 1."""
    ops.mutate(cm.info, "switch_to_generate_", active_args=())
    torch.cuda._sleep(LONG)
    ticket = host_mirrors.start(cm, ("cu_seqlen_host", "seq_len_host"))
    nest(cm, [3, 4], 1, 3)
    torch.cuda.synchronize()
    assert cm.info.get_arg("cu_seqlen_host")[:4].tolist() == [0, 3, 7, 11]
    assert ticket.wait() == ()
    assert cm.info.get_arg("cu_seqlen_host")[:4].tolist() == [0, 3, 7, 11]
    assert cm.info.get_arg("cu_seqlen")[:4].tolist() == [0, 3, 7, 11]


def test_the_device_gets_what_was_staged_although_the_host_writes_mirrors(cm: Any) -> None:
    """Hazard 2."""
    torch.cuda._sleep(LONG)
    nest(cm, [3, 4], 1, 3)
    host_mirrors.before_host_write(cm)
    host_mirrors.host_view(cm, "input_pos")[:3] = 77
    torch.cuda.synchronize()
    assert cm.info.get_arg("input_pos")[:3].tolist() == [0, 0, 9]


@pytest.mark.skipif(host.features["exact_copies"], reason="the embedded host stages elsewhere")
def test_without_the_wait_it_would_get_the_hosts_values(cm: Any) -> None:
    torch.cuda._sleep(LONG)
    nest(cm, [3, 4], 1, 3)
    host_mirrors.host_view(cm, "input_pos")[:3] = 77
    torch.cuda.synchronize()
    assert cm.info.get_arg("input_pos")[:3].tolist() == [77, 77, 77]


def test_a_move_behind_a_pending_upload_leaves_the_device_alone(cm: Any) -> None:
    torch.cuda._sleep(LONG)
    nest(cm, [], 2, 3)
    ops.mutate(cm.info, "switch_to_generate_", active_args=())
    with record_mirrors(cm) as transfers:
        host_mirrors.move(cm, ("cu_seqlen", "input_pos"))
    torch.cuda.synchronize()
    assert len(transfers) == 1
    assert cm.info.get_arg("input_pos_host")[:2].tolist() == [12, 14]
    assert cm.info.get_arg("input_pos")[:2].tolist() == [12, 14]
    assert cm.info.get_arg("slot_idx")[:2].tolist() == [0, 1]


def test_starting_a_transfer_does_not_wait_for_the_device(cm: Any) -> None:
    host_mirrors.start(cm, ("cu_seqlen", "input_pos")).wait()
    torch.cuda._sleep(LONG)
    done = torch.cuda.Event()
    ticket = host_mirrors.start(cm, ("cu_seqlen", "input_pos"))
    done.record()
    assert not done.query()
    ticket.wait()
    assert done.query() or not done.synchronize()


@pytest.mark.skipif(host.name != "embedded", reason="runs in the processes that it starts")
@pytest.mark.parametrize(("root", "age"), [("tensorrt_llm", "current"), ("llmc", "older"), ("llmc", "early")])
def test_the_same_on_a_double_of_autodeploy(root: str, age: str, tmp_path: Path) -> None:
    plant(tmp_path, root, age)
    paths = [str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    env.pop("AUTO_DEPLOY_EXT_HOST", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
