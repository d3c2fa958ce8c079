"""What a spawned process does, as AutoDeploy's workers are started: import, run both passes, run steps."""

from __future__ import annotations

from pathlib import Path


def work(rank: int, folder: str) -> None:
    """Leave the plan and the code of the rewritten graphs in a file of this rank."""
    import torch

    torch.set_num_threads(1)
    import auto_deploy_ext
    from tests.wrappers.harness import reference, same, scoped, step
    from tests.wrappers.library import Eagle

    assert auto_deploy_ext.TransformRegistry.has("scope_host_mirrors")
    wrapper, cm = scoped(Eagle, mode="graph")
    assert same(step(wrapper, cm, [3, 4], 2).output, reference(Eagle, [3, 4], 2).output)
    code = [graph.code for graph in auto_deploy_ext.orchestrator_graphs(wrapper).values()]
    Path(folder, str(rank)).write_text("\n".join([auto_deploy_ext.plan(wrapper, cm).to_json(), *code]))
