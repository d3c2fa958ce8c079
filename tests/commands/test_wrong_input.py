"""What a user may get wrong is answered by one line that names it; nothing is half done then."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from auto_deploy_ext.commands.cli import EXIT_USAGE, main
from auto_deploy_ext.embedded.config import ConfigError, load_config
from auto_deploy_ext.embedded.generation import Engine, generate
from auto_deploy_ext.embedded.models.checkpoint import CheckpointError, load_weights, stored_config, weight_names
from auto_deploy_ext.embedded.models.custom.modeling_eagle3 import Eagle3Options, captured_layers
from auto_deploy_ext.embedded.models.factory import CausalLMFactory
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.embedded.requests import Request, TokenEvent
from auto_deploy_ext.embedded.tokenizer import CheckpointTokenizer, TokenizerError

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
TINY = {"max_new_tokens": 4, "prompts": [[1, 2, 3]]}


def load(**overrides: Any) -> Any:
    return load_config(
        "bench_tiny", overrides=TINY | {key.replace("__", "."): value for key, value in overrides.items()}
    )


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return build_pipeline(load())


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """A function that writes the tiny config with more lines behind it, and gives its path."""

    def write(more: str) -> str:
        text = (Path(__file__).parents[2] / "configs/embedded/bench_tiny.yaml").read_text()
        path = tmp_path / "tiny.yaml"
        path.write_text(text.replace("attn_backend: torch_paged\n", "") + "prompts: [[1, 2]]\n" + more)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("attn_backend: torch_ssm\n", "'torch_ssm' caches auto_deploy_ext.torch_ssm"),
        ("attn_backend: ''\n", "attn_backend: string should have at least 1 character"),
        ("compile_backend: torch-opt\n", "the embedded host compiles with"),
        ("attn_backend: torch_paged\ncompile_backend: torch-cudagraph\n", "reads cu_num_pages_host"),
        ("device: cuda:99\n", "device: cuda:99 is asked for, but PyTorch"),
        ("device: meta\n", "device: not a device; use cpu, cuda or cuda:N"),
        (f"seed: {2**70}\n", "seed: input should be less than"),
    ],
)
def test_a_config_that_cannot_be_built_says_why(write, capsys, more, message):
    assert main(["run", "--config", write(more)]) == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_triton_on_a_cpu_is_refused_unless_it_is_interpreted(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="triton runs on a GPU, but device is cpu: set device: cuda"):
        build_pipeline(load(attn_backend="triton"))


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(write, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for name, reason in ((tmp_path, "it is a directory"), (tmp_path / "file" / "x.json", "file is not a directory")):
        assert main(["run", "--config", write("model: /nowhere\n"), "--json", str(name)]) == EXIT_USAGE
        assert f"{reason}; name another file" in capsys.readouterr().err


def test_config_values_that_no_model_has_name_their_place():
    with pytest.raises(ValueError, match=r"model_kwargs: .*not a multiple of the number of attention heads"):
        build_pipeline(load(model_factory="AutoModelForCausalLM", model_kwargs__num_attention_heads=3))
    with pytest.raises(ConfigError, match="not a device"):
        load(device="xpu")


# ---------------------------------------------------------------- checkpoints


def test_damaged_weights_name_their_file(tmp_path):
    save_file({"weight": torch.zeros(3, 2)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for cut in (0, 5, len(whole) - 4):
        (tmp_path / "model.safetensors").write_bytes(whole[:cut])
        for read in (weight_names, lambda path: load_weights(torch.nn.Linear(2, 3, bias=False), path)):
            with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or cut short"):
                read(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"xx")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is damaged or cut short"):
        weight_names(tmp_path)


def test_fractions_do_not_become_token_numbers(tmp_path):
    module = torch.nn.Module()
    module.register_buffer("d2t", torch.zeros(4, dtype=torch.int64))
    save_file({"d2t": torch.full((4,), 0.5)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'d2t' holds torch\.float32, but should hold torch\.int64"):
        load_weights(module, tmp_path)


@pytest.mark.parametrize(("text", "message"), [("{", "is damaged"), ("[]", "should hold a mapping, it holds a list")])
def test_a_damaged_config_names_its_file(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"config\.json {message}"):
        stored_config(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft_vocab_size": "100"}, "draft_vocab_size should be a number of tokens, it is '100'"),
        ({"draft_vocab_size": -1}, "draft_vocab_size should be a number of tokens, it is -1"),
        ({"vocab_size": 77}, "vocab_size is 77, but the target knows 128 tokens: it is a drafter for another target"),
        ({"eagle_config": "x"}, "eagle_config should be a mapping"),
    ],
)
def test_a_head_of_another_target_is_refused(fields, message):
    target = LlamaConfig(**SIZES)
    with pytest.raises(ValueError, match=message):
        Eagle3Options.from_config(LlamaConfig(**(SIZES | fields)), target)


def test_captured_layers_are_numbers():
    key = "eagle_aux_hidden_state_layer_ids"
    assert captured_layers({key: [0, 2]}) == [0, 2]
    assert captured_layers(None) == captured_layers({}) == []
    with pytest.raises(ValueError, match="lists layers"):
        captured_layers({key: ["a"]})


def test_a_damaged_tokenizer_names_its_directory(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SIZES)).config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "mod')
    with pytest.raises(TokenizerError, match=f"the tokenizer in {tmp_path} cannot be loaded"):
        CheckpointTokenizer(tmp_path)


# ---------------------------------------------------------------- train-draft


def test_a_target_with_a_sliding_window_is_refused_in_a_line(tmp_path, capsys):
    MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)).save_pretrained(tmp_path / "target")
    arguments = ["--model", str(tmp_path / "target"), "--output", str(tmp_path / "out"), "--steps", "1"]
    assert main(["train-draft", *arguments]) == EXIT_USAGE
    assert "MistralForCausalLM (mistral)" in (error := capsys.readouterr().err)
    assert "(sliding_window); train-draft supports targets with plain causal attention" in error


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sequence-length", "3", "--draft-steps", "2"], "give sequences of at least 4 tokens"),
        (["--device", "cud"], "--device cud: give cpu, cuda or cuda:N"),
        (["--init-from", "nowhere"], "--init-from nowhere has no config.json"),
    ],
)
def test_training_refuses_at_once_what_cannot_end_well(tmp_path, capsys, more, message):
    assert main(["train-draft", "--output", str(tmp_path / "out"), "--steps", "1", *more]) == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_training_refuses_a_place_that_is_a_file(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["train-draft", "--output", str(tmp_path / "file"), "--steps", "1"]) == EXIT_USAGE
    assert "file cannot be made: File exists; give another directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--steps", "0", "must be at least 1, got 0"),
        ("--sequences", "x", "must be a whole number, got 'x'"),
        ("--learning-rate", "nan", "must be a number, got 'nan'"),
        ("--time-budget", "-1", "must be above 0, got -1"),
        ("--chat-share", "2", "must be from 0 to 1, got 2"),
        ("--seed", "-1", "must be a whole number from 0"),
    ],
)
def test_numbers_of_train_draft_are_checked(capsys, option, value, message):
    with pytest.raises(SystemExit) as exit_:
        main(["train-draft", f"{option}={value}"])
    assert exit_.value.code == EXIT_USAGE
    assert f"argument {option}: {message}" in capsys.readouterr().err


def test_damaged_text_and_state_of_an_earlier_run_name_their_file(tmp_path):
    from auto_deploy_ext.embedded.training.checkpoint import STATE_FILE, load_state
    from auto_deploy_ext.embedded.training.corpus import load_text

    (tmp_path / STATE_FILE).write_bytes(b"PK\3\4")
    with pytest.raises(CheckpointError, match=f"{STATE_FILE} is damaged or cut short: .*; delete it"):
        load_state(tmp_path, torch.device("cpu"))
    (tmp_path / "text.safetensors").write_bytes(json.dumps({}).encode())
    with pytest.raises(CheckpointError, match=r"text\.safetensors is damaged or cut short: .*; delete it"):
        load_text(tmp_path / "text.safetensors", {})


# ---------------------------------------------------------------- generate


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ([1, 128], 4, "has token 128, the model knows 0 to 127"),
        ([-1], 4, "has token -1"),
        ([1.5], 4, r"prompt 0 should be a sequence of token ids, which are ints: \[1.5\]"),
        ("ab", 4, "prompt 0 should be a sequence of token ids"),
        ([1], 2.5, "max_new_tokens must be a whole number of at least 1, got 2.5"),
        ([1], 0, "max_new_tokens must be a whole number of at least 1, got 0"),
    ],
)
def test_what_is_no_request_is_refused_before_anything_runs(pipeline, prompt, limit, message):
    with pytest.raises(ValueError, match=message):
        generate(pipeline.model, pipeline.cm, [prompt], limit, overlap=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_listener_that_raises_takes_no_tokens_from_other_rows(pipeline, overlap):
    prompts = [(1, 2, 3), (4, 5, 6, 7)]
    expected = [output.tokens for output in generate(pipeline.model, pipeline.cm, prompts, 8).outputs]
    engine = Engine(pipeline.model, pipeline.cm, overlap=overlap)
    told: list[TokenEvent] = []

    def listen(event: TokenEvent) -> None:
        told.append(event)
        if len(told) == 1:
            raise RuntimeError("the listener's own trouble")

    engine.on_tokens = listen
    for prompt in prompts:
        engine.submit(Request(prompt, 8))
    raised = 0
    while engine.has_work:
        try:
            engine.step()
        except RuntimeError:
            raised += 1
    assert raised == 1
    assert [output.tokens for output in engine.result().outputs] == expected
    for number, tokens in enumerate(expected):
        assert sum((event.tokens for event in told if event.request_id == number), ()) == tokens


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kv_cache_config.tokens_per_blok", 8, "unknown field 'tokens_per_blok'; did you mean 'tokens_per_block'?"),
        ("model_kwargs.hiden_size", 8, "model_kwargs: unknown field 'hiden_size'; did you mean 'hidden_size'?"),
        (
            "speculative_model_kwargs.num_captured_layer",
            1,
            "speculative_model_kwargs: unknown field 'num_captured_layer'; did you mean 'num_captured_layers'?",
        ),
        (
            "model_kwargs.model_type",
            "lama",
            "model_kwargs.model_type: unknown architecture 'lama'; did you mean 'llama'?",
        ),
    ],
)
def test_a_misspelled_field_that_others_might_take_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises((ConfigError, ValueError)) as error:
        build_pipeline(load_config("bench_tiny", overrides={field: value}))
    assert message in str(error.value)
    assert len(str(error.value)) < 400


def test_a_misspelled_field_beside_a_checkpoint_is_refused(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES, its_own_field=3)).config.save_pretrained(tmp_path)
    for name, known in (("hiden_size", "hidden_size"), ("its_own_fild", "its_own_field")):
        with pytest.raises(ValueError, match=f"unknown field '{name}'; did you mean '{known}'?"):
            CausalLMFactory(str(tmp_path), model_kwargs={name: 8}).target_config  # noqa: B018


def test_fields_that_only_others_know_are_kept() -> None:
    """AutoDeploy's caches and a model's own code have more fields than those that are known here."""
    config = load_config(
        "bench_tiny", overrides={"kv_cache_config.enable_block_reuse": False, "model_kwargs.my_own_field": 3}
    )
    assert build_pipeline(config).config.kv_cache_config.model_extra == {"enable_block_reuse": False}
