"""The training forward is the inference forward, and a head trained for the tiny target is accepted as simulated."""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from auto_deploy_ext.commands.cli import main
from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.embedded.models.factory import ModelFactoryRegistry
from auto_deploy_ext.embedded.models.gguf_cache import CACHE_VARIABLE
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.embedded.training import seeds
from auto_deploy_ext.embedded.training.arguments import add_arguments
from auto_deploy_ext.embedded.training.command import load_target
from auto_deploy_ext.embedded.training.corpus import DraftVocabulary, FeatureStore, batch_of, states_of
from auto_deploy_ext.embedded.training.evaluate import continue_greedily, greedy_acceptance, read_prompts, runs
from auto_deploy_ext.embedded.training.head import TrainedHead, drafter_config, make_drafter
from auto_deploy_ext.embedded.training.loss import distillation_loss
from auto_deploy_ext.embedded.training.multi_step import MultiStepForward
from auto_deploy_ext.embedded.training.prompts import ANSWER, PLAIN, USER, ChatTemplate, Excluded, Start
from auto_deploy_ext.embedded.training.sampling import Rows, _Turns, write
from auto_deploy_ext.embedded.training.target import TrainingTarget
from auto_deploy_ext.embedded.training.trainer import Trainer, TrainingOptions, describe
from tests.embedded.models.tiny_gguf import write_gguf

STEPS = 4
CONFIG = """
model_kwargs: {model_type: llama, vocab_size: 40, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 3,
  num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, max_position_embeddings: 512}
speculative_config: {decoding_type: Eagle3, max_draft_len: 4}
attn_backend: torch
draft_attn_backend: torch
seed: 27
"""
SIZES = [
    *("--device", "cpu", "--sequences", "64", "--sequence-length", "32", "--sample-rows", "64", "--draft-vocab", "36"),
    *("--batch-sequences", "8", "--log-every", "10", "--learning-rate", "0.01", "--steps", "80"),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of few tokens, which a head can learn to guess in seconds."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def trained(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    assert main(["train-draft", "--config", str(config), *SIZES, "--output", str(directory)]) == 0
    return directory


@pytest.fixture(scope="module")
def target(config: Path) -> TrainingTarget:
    loaded = load_config(str(config))
    factory: Any = ModelFactoryRegistry.get(loaded.model_factory).from_config(loaded)
    return TrainingTarget(factory.build_target(), factory.layers_to_capture(), torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def pipeline(config: Path, trained: Path) -> Pipeline:
    return build_pipeline(load_config(str(config), overrides={"speculative_config.speculative_model": str(trained)}))


def head_of(pipeline: Pipeline, target: TrainingTarget) -> TrainedHead:
    """The loaded drafter's weights in the training forward."""
    loaded: Any = pipeline.model.draft_model
    state = loaded.state_dict()
    tokens = torch.arange(len(loaded.d2t)) + loaded.d2t
    vocabulary = DraftVocabulary.of(tokens, target.vocab_size, target.device)
    drafter = make_drafter(drafter_config(target, len(tokens), None), target, 0)
    names = [name for name, _ in drafter.named_parameters()]
    drafter.load_state_dict({name: state[name] for name in names}, strict=False)
    return TrainedHead(drafter, target, vocabulary, STEPS)


def test_each_training_step_is_what_the_wrapper_computes(pipeline: Pipeline, target: TrainingTarget) -> None:
    model: Any = pipeline.model
    seen: list[tuple[torch.Tensor, int]] = []
    original = model.sample_draft

    def recording(norm_hidden_state: torch.Tensor) -> torch.Tensor:
        drafted = original(norm_hidden_state)
        seen.append((norm_hidden_state[0].clone(), int(drafted[0])))
        return drafted

    prompt = [3, 14, 15, 9, 26]
    model.sample_draft = recording
    try:
        result = generate(model, pipeline.cm, [prompt], 24)
    finally:
        del model.sample_draft
    head = head_of(pipeline, target)
    text = [*prompt, *result.outputs[0].tokens]
    unit = torch.ones(3 * target.hidden_size)
    base, compared = len(prompt) - 1, 0
    for first in range(0, len(seen), STEPS):
        drafts = [token for _, token in seen[first : first + STEPS]]
        if base + 2 + STEPS > len(text):
            break
        batch = batch_of(target, torch.tensor([text[: base + 2] + drafts]), unit)
        for step, states in enumerate(head.states(batch)):
            torch.testing.assert_close(states[0, base], seen[first + step][0], rtol=1e-3, atol=1e-3)
            compared += 1
        accepted = 0
        while accepted < STEPS and drafts[accepted] == text[base + 2 + accepted]:
            accepted += 1
        base += accepted + 1
    assert compared >= 4 * STEPS


def test_training_raises_acceptance_and_the_engine_accepts_as_many_as_simulated(
    trained: Path, pipeline: Pipeline, target: TrainingTarget
) -> None:
    record = json.loads((trained / "training.json").read_text())
    assert record["evaluations"][-1]["greedy"]["length"] > 1.3
    first, last = record["history"][0], record["history"][-1]
    assert last["loss"] < 0.8 * first["loss"] and last["acceptance"][0] > first["acceptance"][0] + 0.2
    prompts = [[7, 1, 9], [20, 30, 4, 36], [12]]
    continuations = continue_greedily(target, [("plain", prompt) for prompt in prompts], 32, STEPS + 2, None)
    head = head_of(pipeline, target)
    simulated = greedy_acceptance(head, continuations, torch.ones(3 * target.hidden_size))
    model: Any = pipeline.model
    result = generate(model, pipeline.cm, prompts, 32)
    for continuation, prompt, output in zip(continuations, prompts, result.outputs, strict=True):
        assert continuation.tokens[len(prompt) :][:32] == list(output.tokens)
    # The engine does not verify a draft that comes with the last token, and cuts drafts off there.
    rows = sum(result.accepted)
    assert abs(sum(map(len, simulated)) - rows) <= len(prompts)
    length = 1 + sum(map(sum, simulated)) / sum(map(len, simulated))
    assert length == pytest.approx(result.acceptance_length, abs=0.2)


def test_the_checkpoint_holds_no_embedding_and_no_head(trained: Path) -> None:
    from safetensors import safe_open

    with safe_open(trained / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert file.get_tensor("d2t").dtype == torch.int64 and file.get_tensor("fc.weight").dtype == torch.bfloat16
        known = torch.arange(36) + file.get_tensor("d2t")
        assert file.get_tensor("t2d").nonzero()[:, 0].tolist() == known.tolist()
    assert not names & {"lm_head.weight", "embed_tokens.weight"}
    config = json.loads((trained / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]


def trainer_on(target: TrainingTarget, directory: Path, seed: int = 1) -> Trainer:
    text = torch.randint(0, target.vocab_size, (24, 20), generator=torch.Generator().manual_seed(5)).to(torch.int32)
    vocabulary = DraftVocabulary.most_frequent(text, target.vocab_size, 32, target.device)
    drafter = make_drafter(drafter_config(target, 32, 64), target, seed)
    head = TrainedHead(drafter, target, vocabulary, 3)
    options = TrainingOptions(batch_sequences=5, steps=12, seed=seed)
    return Trainer(head, FeatureStore(target, text, 7), options, directory, describe(options))


def test_a_resumed_run_ends_with_the_same_weights(target: TrainingTarget, tmp_path: Path) -> None:
    through, first = trainer_on(target, tmp_path / "a"), trainer_on(target, tmp_path / "b")
    for step in range(12):
        through.train_step(step / 12)
    for step in range(5):
        first.train_step(step / 12)
    first.save()
    second = trainer_on(target, tmp_path / "b")
    assert second.resume() and second.step == 5
    for step in range(5, 12):
        second.train_step(step / 12)
    for ours, theirs in zip(through.parameters, second.parameters, strict=True):
        assert torch.equal(ours, theirs)


def test_resuming_with_other_settings_is_refused(target: TrainingTarget, tmp_path: Path) -> None:
    trainer_on(target, tmp_path).save()
    with pytest.raises(ValueError, match="seed"):
        trainer_on(target, tmp_path, seed=2).resume()


def test_an_earlier_run_is_not_overwritten(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train-draft", *SIZES, "--output", str(trained)]) == 2
    assert "--resume" in capsys.readouterr().err


def test_the_losss_gradient_is_autograds() -> None:
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(3, 4, 8, generator=generator, requires_grad=True)
    head = torch.randn(11, 8, generator=generator)
    probabilities = torch.randn(3, 4, 11, generator=generator).softmax(dim=-1)
    labels = torch.randint(0, 11, (3, 4), generator=generator)
    weights = torch.rand(3, 4, generator=generator)
    loss, guesses = distillation_loss(states, head, probabilities @ head, labels, weights, 0.3)
    (gradient,) = torch.autograd.grad(loss, states)
    mixture = 0.3 * probabilities + 0.7 * torch.nn.functional.one_hot(labels, 11)
    expected = (-(mixture * (states @ head.T).log_softmax(dim=-1)).sum(dim=-1) * weights).sum()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, states)[0])
    assert torch.equal(guesses, (states @ head.T).argmax(dim=-1))


def test_greedy_rows_and_their_states_are_the_uncached_models(target: TrainingTarget) -> None:
    starts = [Start((5, 6, 7, 8), PLAIN), Start((5, 6, 9), PLAIN)]
    rows = Rows.of(starts, [0.0, 0.0], "x", target.device)
    rows.stirs.zero_()
    assert rows.shared() == 2
    written = write(target, rows, None, 24, 0, keep_states=True)
    text, states = written.tokens, states_of(target, written.tokens)
    for row, start in enumerate(starts):
        first = len(start.tokens)
        assert text[row, :first].tolist() == list(start.tokens)
        assert text[row, first:].tolist() == states.labels[row, first - 1 : -1].tolist()
        assert written.counted[row].tolist() == [False] * first + [True] * (24 - first)
    assert written.states is not None and torch.equal(written.states.labels, states.labels)
    torch.testing.assert_close(written.states.captured, states.captured, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(written.states.last, states.last, rtol=1e-4, atol=1e-4)


def test_noise_is_drawn_wherever_a_temperature_is_not_zero(target: TrainingTarget) -> None:
    chat = ChatTemplate((1, 2), (30, 31), (32, 33), follow_ups=((5,), (6, 7)))
    starts = [Start((1, 2), USER), Start((1, 2, 3, 30, 31), ANSWER), Start((4,), PLAIN), Start((5, 6), PLAIN)]
    rows = Rows.of(starts, [0.0, 0.7, 0.0, 0.7], "x", target.device)
    noisy, turns = rows.noisy(130), _Turns(rows, chat, target.vocab_size)
    generator = torch.Generator().manual_seed(1)
    seen = set()
    for index in range(1, 130):
        free = (turns.place < 0) & (index >= rows.start_lengths)
        # A user turn behind a greedy answer is greedy.
        later = (turns.role == USER) & (rows.temperatures == 0) & (index >= rows.start_lengths + rows.user_caps)
        wanted = set((free & (turns.temperature() > 0) & ~later).nonzero()[:, 0].tolist())
        assert wanted <= set(noisy[index].tolist())
        seen |= {(row, row in noisy[index].tolist()) for row in range(4)}
        turns.settle(torch.randint(0, 40, (4,), generator=generator), index)
    assert {(0, False), (0, True), (2, False), (2, True)} <= seen


def test_template_tokens_are_forced_between_turns() -> None:
    chat = ChatTemplate((1, 2), (50, 51, 52), (60, 61), sentence_ends=(19,), follow_ups=((70,),))
    rows = Rows.of([Start((1, 2), USER)], [0.0], "x", torch.device("cpu"))
    rows.user_caps.fill_(3)
    rows.one_sentence.fill_(True)
    turns = _Turns(rows, chat, 80)
    sampled = [9, 10, 11, 12, 13, 14, 15, 60, 16, 17, 19, 18, 20, 21, 22]
    roles, text, counted = [], [1], [False]
    for index, token in enumerate(sampled, start=1):
        roles.append(int(turns.role[0]))
        text.append(int(turns.settle(torch.tensor([token]), index)[0]))
        counted.append(bool(turns.counted[0]))
    #      start, user's until the cap, then forced, answer with its end, forced, a sentence of the user, forced, answer
    assert text == [1, 2, 10, 11, 50, 51, 52, 15, 60, 61, 70, 19, 50, 51, 52, 22]
    assert roles[:3] == [USER] * 3 and roles[6] == ANSWER and roles[10] == USER and roles[14] == ANSWER
    assert [index for index, flag in enumerate(counted) if flag] == [7, 8, 15]
    assert runs(counted) == [(7, 9), (15, 16)]


PROMPTS = Path(__file__).parents[3] / "benchmarks" / "data" / "smollm2_prompts.json"
HELD_OUT_SUBJECTS = [
    "weather",
    "climate",
    "sleeping",
    "lighthouse",
    "phases",
    "tomato",
    "largest even",
    "romeo",
    "juliet",
    "bicycle",
    "landlord",
    "heating",
    "have rings",
    "saturn",
    "harbour",
    "fishing boat",
    "photosynthesis",
    "fibonacci",
    "astronaut",
    "1969",
    "teaspoon of salt",
    "cups of flour",
    "musical instrument",
    "clockmaker",
    "database",
    "portugal",
    "lisbon",
    "norway",
    "shape the landscape",
    "erosion",
]


def test_no_seed_is_like_a_held_out_prompt() -> None:
    fields = (seeds.CHAT_STEMS, seeds.CHAT_FRAMES, seeds.CODE_FRAMES, seeds.CODE_TASKS, seeds.SUBJECTS)
    everything = [
        line for lines in (*fields, seeds.PLAIN_FRAMES, seeds.PLAIN_STEMS, seeds.CODE_STEMS) for line in lines
    ]
    assert len(everything) > 1000 and len(set(seeds.SUBJECTS)) == len(seeds.SUBJECTS)
    for line in everything:
        assert not [subject for subject in HELD_OUT_SUBJECTS if subject in line.lower()], line
    prompts = [prompt.lower() for _, prompt in read_prompts(PROMPTS)]
    covered = [any(subject in prompt for subject in HELD_OUT_SUBJECTS) for prompt in prompts]
    assert len(prompts) == 20 and all(covered)
    generator = random.Random(1)
    drawn = [draw(generator) for draw in (seeds.chat_turn, seeds.plain_start, seeds.chat_stem) for _ in range(300)]
    assert len(set(drawn)) > 600 and not any(prompt in text.lower() for text in drawn for prompt in prompts)


def test_sequences_with_most_of_a_held_out_prompt_are_left_out() -> None:
    excluded = Excluded([[*range(100, 112)], [7, 8, 9]])
    text = torch.zeros(5, 20, dtype=torch.int32)
    text[1, 3:11] = torch.arange(102, 110)
    text[2, 3:10] = torch.arange(102, 109)
    text[3, 17:] = torch.tensor([7, 8, 9])
    text[4, 17:] = torch.tensor([7, 9, 8])
    assert excluded(text, torch.device("cpu"), 2).tolist() == [False, True, False, True, False]


def test_a_second_run_starts_with_the_first_ones_weights(config: Path, trained: Path, tmp_path: Path) -> None:
    again = ["train-draft", "--config", str(config), *SIZES, "--init-from", str(trained)]
    assert main([*again, "--steps", "4", "--output", str(tmp_path / "second")]) == 0
    first, second = (json.loads((path / "training.json").read_text()) for path in (trained, tmp_path / "second"))
    assert second["evaluations"][0]["step"] == 0
    assert second["evaluations"][0]["sampled"]["length"] > 0.9 * first["evaluations"][-1]["sampled"]["length"]
    assert second["evaluations"][0]["greedy"]["length"] > 1.2
    assert [run["command"]["seed"] for run in second["earlier_runs"]] == [27]
    best = max(entry["sampled"]["length"] for entry in second["evaluations"])
    written = {entry["step"]: entry["sampled"]["length"] for entry in second["evaluations"]}[second["written_step"]]
    assert written == best


def test_a_configs_target_may_be_a_gguf_file_and_its_layers_are_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"model: {tmp_path / 'tiny.gguf'}\n"
        "speculative_config: {decoding_type: Eagle3, max_draft_len: 2, eagle3_layers_to_capture: [1]}\n"
    )
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    found, tokenizer = load_target(parser.parse_args(["--config", str(path)]), torch.device("cpu"))
    assert found.capture == (1,)
    assert found.vocab_size == 261
    assert tokenizer.decode(tokenizer("hello").input_ids) == "hello"


def test_bases_leave_room_for_all_steps(target: TrainingTarget) -> None:
    drafter = make_drafter(drafter_config(target, 16, 32), target, 0)
    assert MultiStepForward(drafter, 3).bases(10) == 7
