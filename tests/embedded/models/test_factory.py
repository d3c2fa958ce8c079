"""Factories: which model a config describes, its weights from a seed or a checkpoint directory, and the drafter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from auto_deploy_ext.embedded.models.checkpoint import CheckpointError, load_weights, weight_names
from auto_deploy_ext.embedded.models.custom.modeling_eagle import EagleWrapper
from auto_deploy_ext.embedded.models.custom.modeling_eagle3 import Eagle3Drafter
from auto_deploy_ext.embedded.models.factory import CausalLMFactory, ModelFactoryRegistry

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EAGLE3 = {"decoding_type": "Eagle3", "max_draft_len": 2}


def factory(**changes: Any) -> CausalLMFactory:
    arguments = {"model_kwargs": {"model_type": "llama", **SIZES}, "seed": 3} | changes
    return CausalLMFactory(arguments.pop("model", None), **arguments)


def eagle3(**drafter: Any) -> EagleWrapper:
    model = factory(speculative_config=EAGLE3, speculative_model_kwargs=drafter).build_model()
    assert isinstance(model, EagleWrapper)
    return model


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


def test_registry_names_the_near_miss() -> None:
    assert ModelFactoryRegistry.has("AutoModelForCausalLM")
    with pytest.raises(KeyError, match="did you mean 'AutoModelForCausalLM'"):
        ModelFactoryRegistry.get("AutoModelForCausalLm")


def test_without_speculation_the_target_is_the_model() -> None:
    built = factory()
    model = built.build_model()
    assert isinstance(model, LlamaForCausalLM)
    assert built.layers_to_capture() == ()
    assert [(info.path, info.role) for info in built.get_export_infos(model)] == [("", "model")]


def test_a_seed_means_the_same_weights_and_another_seed_others() -> None:
    state = torch.get_rng_state()
    first, again = factory(speculative_config=EAGLE3).build_model(), factory(speculative_config=EAGLE3).build_model()
    assert same_weights(first, again)
    assert not same_weights(first, factory(speculative_config=EAGLE3, seed=4).build_model())
    assert torch.equal(state, torch.get_rng_state())


def test_end_tokens_are_those_that_transformers_generates_to(tmp_path: Path) -> None:
    assert factory().end_token_ids() == ()
    model = LlamaForCausalLM(LlamaConfig(**SIZES, eos_token_id=7))
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(tmp_path)
    assert LlamaForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id == [2, 5]
    assert factory(model=str(tmp_path), model_kwargs={}).end_token_ids() == (2, 5)
    assert factory(model=str(tmp_path), model_kwargs={"eos_token_id": 9}).end_token_ids() == (9,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert factory(model=str(tmp_path), model_kwargs={}).end_token_ids() == (3,)
    (tmp_path / "generation_config.json").write_text("{}")
    assert factory(model=str(tmp_path), model_kwargs={}).end_token_ids() == ()
    (tmp_path / "generation_config.json").unlink()
    assert factory(model=str(tmp_path), model_kwargs={}).end_token_ids() == (7,)
    assert factory(model=str(tmp_path), model_kwargs={"eos_token_id": None}).end_token_ids() == ()


def test_dtype_reaches_target_and_drafter() -> None:
    model = factory(speculative_config=EAGLE3, dtype=torch.bfloat16).build_model()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_kwargs": {"hidden_size": 8}}, "model_type is missing"),
        ({"speculative_config": {"decoding_type": "Eagle"}}, "unknown decoding_type 'Eagle'; did you mean 'Eagle3'"),
        ({"model_kwargs": {"model_type": "llama", **SIZES, "tie_word_embeddings": True}}, "tie_word_embeddings: false"),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        factory(**changes).build_model()


def test_a_directory_without_a_config_is_an_error_and_nothing_is_downloaded(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        factory(model=str(tmp_path), model_kwargs={}).build_model()


def test_captured_layers_default_to_three_and_may_be_named() -> None:
    assert factory(speculative_config=EAGLE3).layers_to_capture() == (0, 2, 3)
    deep = {"model_type": "llama", **SIZES, "num_hidden_layers": 32}
    assert factory(speculative_config=EAGLE3, model_kwargs=deep).layers_to_capture() == (1, 15, 28)
    named = EAGLE3 | {"eagle3_layers_to_capture": [3, 1, 0]}
    assert factory(speculative_config=named).layers_to_capture() == (0, 1, 3)
    with pytest.raises(ValueError, match=r"names layers \[4\], but the target has layers 0 to 3"):
        factory(speculative_config=EAGLE3 | {"eagle3_layers_to_capture": [4]}).layers_to_capture()


# ---------------------------------------------------------------- the drafter


def test_drafter_has_the_weights_of_an_eagle3_checkpoint() -> None:
    layer = {"input_layernorm", "hidden_norm", "post_attention_layernorm"}
    layer |= {f"self_attn.{part}_proj" for part in "qkvo"} | {f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    own = {f"midlayer.{name}.weight" for name in layer} | {"fc.weight", "norm.weight", "lm_head.weight"}
    assert set(eagle3().draft_model.state_dict()) == own
    mapped = set(eagle3(draft_vocab_size=20).draft_model.state_dict())
    assert mapped == own | {"d2t", "t2d"}
    assert set(eagle3(own_embedding=True).draft_model.state_dict()) == own | {"embed_tokens.weight"}
    assert set(eagle3(own_lm_head=False).draft_model.state_dict()) == own - {"lm_head.weight"}


def test_drafter_takes_its_sizes_from_the_target_unless_told() -> None:
    drafter = eagle3(head_dim=16).draft_model
    assert drafter.fc.weight.shape == (32, 3 * 32)
    assert drafter.midlayer.self_attn.q_proj.weight.shape == (4 * 16, 2 * 32)
    assert drafter.midlayer.self_attn.o_proj.weight.shape == (32, 4 * 16)


def test_d2t_and_t2d_describe_the_same_tokens() -> None:
    drafter = eagle3(draft_vocab_size=20).draft_model
    tokens = torch.arange(20) + drafter.d2t
    assert torch.equal(tokens, drafter.t2d.nonzero().flatten())
    target_head = eagle3(draft_vocab_size=20).target_model.get_output_embeddings().weight
    assert torch.equal(drafter.lm_head.weight, target_head[tokens])


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"hidden_size": 16}, "set own_embedding: true"),
        ({"draft_vocab_size": 50}, "draft_vocab_size is 50, but the target knows 48"),
        ({"hidden_size": 16, "own_embedding": True, "own_lm_head": False}, "set own_lm_head: true"),
    ],
)
def test_parts_that_do_not_fit_cannot_be_shared(drafter: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eagle3(**drafter)


def test_drafter_of_another_width_is_built_and_runs() -> None:
    wrapper = eagle3(hidden_size=16, own_embedding=True)
    drafter = wrapper.draft_model
    assert drafter.fc.weight.shape == (16, 3 * 32)
    ids = torch.arange(6).view(2, 3)
    norm, last = drafter(drafter.get_input_embeddings()(ids), torch.arange(3).repeat(2, 1), torch.randn(2, 3, 16))
    assert norm.shape == last.shape == (2, 3, 16)


def test_drafter_with_more_heads_has_those_of_the_targets_first_layer() -> None:
    wrapper = eagle3(num_attention_heads=8, num_key_value_heads=4)
    drafter, layer = wrapper.draft_model.midlayer.self_attn, wrapper.target_model.model.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        taken = getattr(layer, name).weight
        assert torch.equal(getattr(drafter, name).weight[: len(taken), :32], taken)
        assert getattr(drafter, name).weight[: len(taken), 32:].abs().max() == 0
    assert torch.equal(drafter.o_proj.weight[:, :32], layer.o_proj.weight)
    alone = eagle3(num_attention_heads=4, num_key_value_heads=2).draft_model.midlayer.self_attn
    assert not torch.equal(alone.q_proj.weight[:, :32], layer.q_proj.weight)


def test_drafter_sees_embedding_hidden_state_and_earlier_positions() -> None:
    torch.manual_seed(0)
    drafter = eagle3(num_attention_heads=8, num_key_value_heads=4).draft_model
    embeds, hidden, positions = torch.randn(1, 4, 32), torch.randn(1, 4, 32), torch.arange(4)[None]
    with torch.no_grad():
        base = drafter(embeds, positions, hidden)[0]
        for changed in (0, 1):
            inputs = [embeds.clone(), hidden.clone()]
            inputs[changed][:, 1] += 1.0
            difference = (drafter(inputs[0], positions, inputs[1])[0] - base).abs().amax(dim=-1)[0]
            # The state before a position counts there; its token also later, through the heads that see the context.
            reached = difference[1:] if changed == 0 else difference[1:2]
            assert difference[0] == 0 and bool((reached > 1e-3).all())


# ---------------------------------------------------------------- checkpoints


@pytest.fixture
def saved(tmp_path: Path) -> tuple[LlamaForCausalLM, Path]:
    torch.manual_seed(9)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    directory = tmp_path / "target"
    model.save_pretrained(directory, max_shard_size="20kB")
    return model, directory


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(ids.shape[1]).repeat(len(ids), 1)
    with torch.no_grad():
        return model(inputs_embeds=model.get_input_embeddings()(ids), position_ids=positions)


def test_a_saved_model_loads_and_equals_itself(saved: tuple[LlamaForCausalLM, Path]) -> None:
    original, directory = saved
    assert len(list(directory.glob("*.safetensors"))) > 1
    loading = factory(model=str(directory), model_kwargs={})
    model = loading.build_model()
    assert not same_weights(model, original)
    assert loading.load_or_random_init(model, torch.device("cpu")) == len(original.state_dict())
    assert same_weights(model, original)
    ids = torch.randint(0, 48, (2, 7), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(logits(model, ids), original(ids).logits, atol=2e-5, rtol=1e-5)


def test_a_tied_checkpoint_without_a_head_loads(tmp_path: Path) -> None:
    original = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    original.save_pretrained(tmp_path)
    assert "lm_head.weight" not in weight_names(tmp_path)
    loading = factory(model=str(tmp_path), model_kwargs={})
    model = loading.build_model()
    loading.load_or_random_init(model, torch.device("cpu"))
    assert same_weights(model, original)


def test_an_eagle3_directory_brings_its_own_parts(tmp_path: Path) -> None:
    source = eagle3(draft_vocab_size=20, own_embedding=True).draft_model
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(0.25)
    save_file({name: value.contiguous() for name, value in source.state_dict().items()}, tmp_path / "model.safetensors")
    config = SIZES | {"num_hidden_layers": 1, "draft_vocab_size": 20, "architectures": ["LlamaForCausalLMEagle3"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    loading = factory(speculative_config=EAGLE3 | {"speculative_model": str(tmp_path)})
    wrapper = loading.build_model()
    assert isinstance(wrapper.draft_model, Eagle3Drafter)
    assert not same_weights(wrapper.draft_model, source)
    assert loading.load_or_random_init(wrapper, torch.device("cpu")) == len(source.state_dict())
    assert same_weights(wrapper.draft_model, source)


def test_what_follows_from_the_config_is_not_loaded(tmp_path: Path) -> None:
    state = nn.Linear(2, 3).state_dict() | {"layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file(dict(state), tmp_path / "model.safetensors")
    assert load_weights(nn.Linear(2, 3), tmp_path) == 2


def test_pytorch_files_load_too(tmp_path: Path) -> None:
    source, target = nn.Linear(2, 3), nn.Linear(2, 3)
    torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
    assert weight_names(tmp_path) == {"weight", "bias"}
    assert load_weights(target, tmp_path) == 2
    assert same_weights(source, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("bias"), "1 weights of the model are missing: bias"),
        (lambda state: state.update(wieght=torch.zeros(1)), "'wieght' is not in the model; the nearest .* 'weight'"),
        (lambda state: state.update(bias=torch.zeros(4)), r"'bias' is \[4\], the model's is \[3\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_an_error(tmp_path: Path, change: Any, message: str) -> None:
    state = nn.Linear(2, 3).state_dict()
    change(state)
    save_file(dict(state), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_weights(nn.Linear(2, 3), tmp_path)


def test_a_directory_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors"):
        load_weights(nn.Linear(2, 3), tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        load_weights(nn.Linear(2, 3), tmp_path / "missing")
