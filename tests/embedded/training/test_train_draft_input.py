"""What `train-draft` is given is checked before anything long: held-out prompts, sizes, the device, a head's layers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from auto_deploy_ext.commands.cli import EXIT_USAGE, main
from auto_deploy_ext.embedded.training import command
from auto_deploy_ext.embedded.training.arguments import add_arguments
from auto_deploy_ext.embedded.training.checkpoint import check_layers
from auto_deploy_ext.embedded.training.command import TEXT_FILE, load_target
from auto_deploy_ext.embedded.training.evaluate import read_prompts
from auto_deploy_ext.embedded.training.target import tf32_products

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def refused(capsys: pytest.CaptureFixture[str], output: Path, *arguments: str) -> str:
    """The line that the command ends with, having made nothing."""
    assert main(["train-draft", "--output", str(output), "--steps", "1", *arguments]) == EXIT_USAGE
    assert not output.exists()
    error = capsys.readouterr().err
    assert "Traceback" not in error and "target:" not in error
    return error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "should be a JSON list of at least one"),
        ('{"kind": "chat", "text": "Hi"}', "should be a JSON list of at least one"),
        ("[", "is not a JSON list of"),
        ('["Hi"]', 'entry 1: should be {"kind": "chat" or "plain", "text": "..."}, it is "Hi"'),
        ('[{"kind": "chat"}]', "entry 1: should be"),
        ('[{"kind": "plain", "text": "Hi"}, {"kind": "plain", "text": ""}]', "entry 2: text should be a string"),
        ('[{"kind": "chat", "text": 7}]', "entry 1: text should be a string that is not empty, it is 7"),
        ('[{"kind": "chats", "text": "Hi"}]', 'entry 1: kind should be "chat" or "plain", it is "chats"'),
        ('[{"kind": ["chat"], "text": "Hi"}]', 'entry 1: kind should be "chat" or "plain", it is ["chat"]'),
    ],
)
def test_held_out_prompts_name_the_file_and_the_entry(tmp_path, capsys, content, message):
    path = tmp_path / "prompts.json"
    path.write_text(content)
    error = refused(capsys, tmp_path / "out", "--held-out", str(path))
    assert str(path) in error
    assert message in error


def test_a_file_of_prompts_that_is_no_text_or_not_there_is_named(tmp_path, capsys):
    path = tmp_path / "prompts.json"
    path.write_bytes(b"\xff\xfe")
    assert f"{path} is not a JSON list" in refused(capsys, tmp_path / "out", "--held-out", str(path))
    assert "nowhere.json" in refused(capsys, tmp_path / "out", "--held-out", str(tmp_path / "nowhere.json"))
    path.write_text('[{"kind": "plain", "text": "Hi"}, {"text": "Why?", "kind": "chat"}]')
    assert read_prompts(path) == [("plain", "Hi"), ("chat", "Why?")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sequences", "1"], "--sequences 1: give at least 2, one to train on and one held out"),
        (["--device", "cuda:x"], "--device cuda:x: give cpu, cuda or cuda:N"),
        (["--device", "meta"], "--device meta: give cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], f"--device cuda:99: PyTorch {torch.__version__} finds "),
    ],
)
def test_one_sequence_and_devices_that_are_not_there_are_refused_at_once(tmp_path, capsys, arguments, message):
    assert message in refused(capsys, tmp_path / "out", *arguments)


def test_a_gpu_beyond_the_last_one_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert command.chosen_device("cuda:1") == torch.device("cuda:1")
    assert command.chosen_device(None) == torch.device("cuda")
    with pytest.raises(command.TrainingError, match=r"--device cuda:2: .* finds GPUs 0 to 1; give one of them"):
        command.chosen_device("cuda:2")


def test_a_kept_text_of_one_sequence_is_too_short(tmp_path, capsys):
    config = tmp_path / "tiny.yaml"
    config.write_text(
        f"model_kwargs: {json.dumps({'model_type': 'llama', **SIZES})}\n"
        "speculative_config: {decoding_type: Eagle3, max_draft_len: 2}\n"
    )
    tokens = torch.arange(12, dtype=torch.int32)[None]
    about = {"target": str(config), "length": "12", "seed": "27", "chat_share": "0.55", "general_share": "0.15"}
    (tmp_path / "work").mkdir()
    save_file({"tokens": tokens, "counted": tokens > 0}, tmp_path / "work" / TEXT_FILE, metadata=about)
    options = ["--config", str(config), "--device", "cpu", "--sequence-length", "12", "--resume", "--steps", "1"]
    assert main(["train-draft", *options, "--output", str(tmp_path / "out"), "--work-dir", str(tmp_path / "work")]) == 2
    assert "1 of 1 sequences are left, too few to train on and to hold one out" in capsys.readouterr().err


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_a_configs_model_kwargs_hold_for_its_checkpoint_too(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "target")
    config = tmp_path / "tiny.yaml"
    config.write_text(
        f"model: {tmp_path / 'target'}\n"
        "model_kwargs: {rms_norm_eps: 0.25, num_hidden_layers: 1}\n"
        "speculative_config: {decoding_type: Eagle3, max_draft_len: 2}\n"
    )
    target, _ = load_target(parsed("--config", str(config)), torch.device("cpu"))
    assert target.config.rms_norm_eps == target.layers[0].input_layernorm.variance_epsilon == 0.25
    assert len(target.layers) == 1 and set(target.capture) == {0}
    plain, _ = load_target(parsed("--model", str(tmp_path / "target")), torch.device("cpu"))
    assert len(plain.layers) == 2
    assert torch.equal(plain.embedding, target.embedding)


def test_a_head_that_reads_other_layers_is_refused_before_text_is_sampled(tmp_path, capsys):
    head = tmp_path / "head"
    head.mkdir()
    (head / "model.safetensors").write_bytes(b"")
    fields: dict[str, Any] = {"intermediate_size": 32}
    (head / "config.json").write_text(json.dumps(fields))
    check_layers(head, (0, 1))
    fields["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 0]}
    (head / "config.json").write_text(json.dumps(fields))
    check_layers(head, (0, 1))
    LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 3})).save_pretrained(tmp_path / "target")
    target = ["--model", str(tmp_path / "target"), "--device", "cpu", "--init-from", str(head)]
    assert main(["train-draft", "--output", str(tmp_path / "out"), "--steps", "1", *target]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert f"{head} holds a head that reads layers [1, 0], but of the target layers [0, 1, 2] are captured" in error
    assert "sampling" not in error


def test_the_processs_tf32_setting_comes_back():
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    with pytest.raises(KeyError), tf32_products(torch.device("cuda")):
        assert matmul.allow_tf32
        raise KeyError
    assert matmul.allow_tf32 == before
    with tf32_products(torch.device("cpu")):
        assert matmul.allow_tf32 == before
