"""Training of a head on a GPU: the command from sampling to the written head, and its numbers against the CPU's."""

import json
from pathlib import Path

import pytest
import torch

from auto_deploy_ext.commands.cli import main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_command_trains_within_its_time(tmp_path: Path) -> None:
    command = ["train-draft", "-v", "--config", "eagle3_llama", "--device", "cuda", "--output", str(tmp_path)]
    sizes = ["--sequences", "4096", "--sample-rows", "2048", "--sequence-length", "48", "--draft-vocab", "192"]
    assert main([*command, *sizes, "--time-budget", "14", "--checkpoint-seconds", "3", "--log-every", "20"]) == 0
    record = json.loads((tmp_path / "training.json").read_text())
    summary = {key: record[key] for key in ("seconds", "text_tokens")} | {
        "first": record["history"][0],
        "last": record["history"][-1],
        "evaluation": record["evaluations"][-1],
    }
    assert record["seconds"]["total"] < 16, summary
    assert record["history"][-1]["loss"] < 0.9 * record["history"][0]["loss"], summary
    assert (tmp_path / "model.safetensors").is_file()


def test_gpu_training_step_agrees_with_the_cpus(tmp_path: Path) -> None:
    from typing import Any

    from auto_deploy_ext.embedded.config import load_config
    from auto_deploy_ext.embedded.models.factory import ModelFactoryRegistry
    from auto_deploy_ext.embedded.training.corpus import DraftVocabulary, FeatureStore
    from auto_deploy_ext.embedded.training.head import TrainedHead, drafter_config, make_drafter
    from auto_deploy_ext.embedded.training.target import TrainingTarget
    from auto_deploy_ext.embedded.training.trainer import Trainer, TrainingOptions

    losses = {}
    for name, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        config = load_config("eagle3_llama")
        factory: Any = ModelFactoryRegistry.get(config.model_factory).from_config(config)
        target = TrainingTarget(factory.build_target(), factory.layers_to_capture(), torch.device(name), dtype)
        text = torch.randint(0, 256, (32, 40), generator=torch.Generator().manual_seed(5)).to(torch.int32)
        vocabulary = DraftVocabulary.most_frequent(text, target.vocab_size, 128, target.device)
        head = TrainedHead(make_drafter(drafter_config(target, 128, 64), target, 1), target, vocabulary, 4)
        options = TrainingOptions(batch_sequences=8, steps=8)
        trainer = Trainer(head, FeatureStore(target, text, 16), options, tmp_path / name, {})
        losses[name] = [float(trainer.train_step(step / 8)[0]) for step in range(8)]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=0.03), losses
