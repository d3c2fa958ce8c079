"""What building a pipeline does to the process: the GPU that a config numbers becomes the current one."""

from __future__ import annotations

import pytest
import torch

from auto_deploy_ext.embedded import pipeline
from auto_deploy_ext.embedded.config import ConfigError, load_config


@pytest.mark.parametrize(("device", "chosen"), [("cuda:2", [2]), ("cuda:0", [0]), ("cuda", []), ("cpu", [])])
def test_the_gpu_that_a_config_numbers_becomes_the_current_one(
    device: str, chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is made: captures and Triton's launches go to the current one."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(device.index))

    class Stopped(Exception):
        pass

    def stop(config: object) -> None:
        raise Stopped

    monkeypatch.setattr(pipeline, "make_interface", stop)
    config = load_config("eagle3_llama", overrides={"device": device})
    with pytest.raises(Stopped):
        pipeline.build_pipeline(config)
    assert current == chosen


def test_a_gpu_that_is_not_there_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail(f"{device} is chosen"))
    with pytest.raises(ConfigError, match="finds GPUs 0 to 1"):
        pipeline.use_device(load_config("eagle3_llama", overrides={"device": "cuda:2"}))
