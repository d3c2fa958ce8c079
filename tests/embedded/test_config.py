"""A config is merged over the default, and each thing that can be wrong with it is told with file, line and key."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
import torch
from pydantic import ConfigDict, Field, ValidationError

import auto_deploy_ext.embedded.config as config_module
from auto_deploy_ext.embedded.config import ConfigError, EmbeddedConfig, available_configs, load_config
from auto_deploy_ext.embedded.transform.interface import BaseTransform, TransformConfig, TransformRegistry
from auto_deploy_ext.embedded.yaml_places import document_from_overrides, merge, read_document


class OwnConfig(TransformConfig):
    """As the plugin's own transforms have it: an unknown field is an error."""

    model_config = ConfigDict(extra="forbid")
    strategy: str = Field(default="override", description="How a mirror is brought up to date.")


class OwnTransform(BaseTransform):
    @classmethod
    def get_config_class(cls):
        return OwnConfig


@pytest.fixture(autouse=True)
def transforms(monkeypatch):
    """Two transforms besides the ones there are: one as AutoDeploy has them and one as the plugin has them."""
    config_module._register_transforms()
    probes = {"probe_caches": BaseTransform, "rewrite_probes": OwnTransform}
    monkeypatch.setattr(TransformRegistry, "_registry", TransformRegistry._registry | probes)


@pytest.fixture
def write(tmp_path):
    """Writes a YAML file and returns its path."""

    def write(text: str, name: str = "my.yaml") -> Path:
        path = tmp_path / name
        path.write_text(dedent(text), encoding="utf-8")
        return path

    return write


def errors(path: Path | str, **kwargs) -> list[str]:
    """The lines of the error about a config, without the folder that the file lies in."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, **kwargs)
    return str(caught.value).replace(f"{Path(path).parent}/", "").splitlines()


# Values -----------------------------------------------------------------------------------------------------------


def test_the_default_config_is_complete():
    config = load_config("default")
    assert (config.device, config.dtype, config.compile_backend) == ("cpu", "float32", "torch-simple")
    assert config.kv_cache_config.tokens_per_block == 32
    assert config.torch_device == torch.device("cpu")
    assert config.torch_dtype is torch.float32
    assert config.max_draft_len == 0


def test_every_shipped_config_loads():
    assert "default" in available_configs()
    for name in available_configs():
        assert load_config(name).max_seq_len >= 1


def test_every_field_has_a_description():
    for model in (EmbeddedConfig, config_module.SpeculativeConfig):
        assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_a_file_is_merged_over_the_default(write):
    path = write(
        """
        seed: 7
        model_kwargs: {hidden_size: 32}
        speculative_config:
          decoding_type: Eagle3
          max_draft_len: 4
        prompts: [hello, [1, 2]]
        """
    )
    config = load_config(path)
    assert config.seed == 7
    assert config.model_kwargs == {"hidden_size": 32}
    assert config.max_draft_len == 4
    assert config.prompts == ["hello", [1, 2]]
    assert config.max_seq_len == load_config("default").max_seq_len


def test_an_empty_file_changes_nothing(write):
    assert load_config(write("# nothing\n")) == load_config("default")


def test_added_transforms_come_last_and_known_ones_keep_their_place(write):
    first = write("transforms: {probe_caches: {stage: cache_init, depth: 1}}", "first.yaml")
    second = write(
        """
        transforms:
          rewrite_probes: {stage: cache_init}
          probe_caches: {depth: 2}
        """,
        "second.yaml",
    )
    transforms = load_config(first, extra=[second]).transforms
    assert list(transforms)[-2:] == ["probe_caches", "rewrite_probes"]
    assert transforms["probe_caches"] == {"stage": "cache_init", "depth": 2}


def test_autodeploys_own_transforms_keep_unknown_fields(write):
    path = write("transforms: {probe_caches: {stage: compile, cuda_graph_batch_sizes: [1, 2]}}")
    assert load_config(path).transforms["probe_caches"]["cuda_graph_batch_sizes"] == [1, 2]


def test_overrides_win_over_files(write):
    path = write("speculative_config: {decoding_type: MTP, max_draft_len: 2}")
    config = load_config(path, overrides={"speculative_config.max_draft_len": 3, "kv_cache_config.tokens_per_block": 4})
    assert config.speculative_config.decoding_type == "MTP"
    assert config.max_draft_len == 3
    assert config.kv_cache_config.tokens_per_block == 4


def test_null_switches_speculation_off(write):
    path = write("speculative_config: {decoding_type: MTP}")
    assert load_config(path, overrides={"speculative_config": None}).max_draft_len == 0
    assert load_config(path, overrides={"speculative_config.decoding_type": None}).max_draft_len == 0


def test_top_level_backends_reach_the_transforms_that_do_not_name_their_own():
    config = EmbeddedConfig(
        attn_backend="torch_paged",
        draft_attn_backend="torch",
        transforms={
            "insert_cached_attention": {"stage": "cache_init"},
            "compile_model": {"stage": "compile", "backend": "torch-compile"},
        },
    )
    assert config.transforms["insert_cached_attention"] == {
        "stage": "cache_init",
        "backend": "torch_paged",
        "draft_backend": "torch",
    }
    assert config.transforms["compile_model"]["backend"] == "torch-compile"


def test_a_page_of_draft_length_plus_one_is_enough():
    config = load_config(
        "default",
        overrides={
            "speculative_config.decoding_type": "Eagle3",
            "speculative_config.max_draft_len": 3,
            "kv_cache_config.tokens_per_block": 4,
        },
    )
    assert config.kv_cache_config.tokens_per_block == 4


# Wrong fields and values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nmax_batch_siz: 3\n", "my.yaml:2: max_batch_siz: unknown field; did you mean 'max_batch_size'?"),
        ("\n\nmax_seq_len: many\n", "my.yaml:3: max_seq_len: input should be a valid integer, not 'many'"),
        ("max_seq_len: '512'\n", "my.yaml:1: max_seq_len: input should be a valid integer, not '512'"),
        ("max_new_tokens: 0\n", "my.yaml:1: max_new_tokens: input should be greater than or equal to 1, not 0"),
        ("seed: 1\nmodel: [a]\n", "my.yaml:2: model: input should be a valid string, not ['a']"),
        ("model_kwargs: 3\n", "my.yaml:1: model_kwargs: input should be a mapping, not 3"),
        ("device: gpu\n", "my.yaml:1: device: not a device; use cpu, cuda or cuda:N, not 'gpu'"),
        ("dtype: float23\n", "my.yaml:1: dtype: input should be 'float32', 'float64', 'bfloat16' or 'float16', "
            "not 'float23'; did you mean 'float32'?"),
        ("prompts:\n  - hello\n  - 3.5\n", "my.yaml:3: prompts.1: input should be a valid string, not 3.5; "
            "or input should be a valid list, not 3.5"),
        ("speculative_config: Eagle3\n", "my.yaml:1: speculative_config: input should be a mapping, not 'Eagle3'"),
        ("speculative_config:\n  max_draft_lenn: 2\n",
            "my.yaml:2: speculative_config.max_draft_lenn: unknown field; did you mean 'max_draft_len'?"),
        ("speculative_config:\n  decoding_type: MTP\n  max_draft_len: 0\n",
            "my.yaml:3: speculative_config.max_draft_len: input should be greater than or equal to 1, not 0"),
        ("speculative_config:\n  decoding_type: Eagel3\n", "my.yaml:2: speculative_config.decoding_type: "
            "input should be 'Eagle3' or 'MTP', not 'Eagel3'; did you mean 'Eagle3'?"),
        ("seed: 1\nkv_cache_config: {tokens_per_block: [1]}\n",
            "my.yaml:2: kv_cache_config.tokens_per_block: input should be a valid integer, not [1]"),
        ("seed: 1\n1: 2\n", "my.yaml:2: 1: a field's name has to be text; quote it"),
        ("transforms: [probe_caches]\n", "my.yaml:1: transforms: input should be a mapping, not ['probe_caches']"),
        ("transforms:\n  probe_caches: 3\n", "my.yaml:2: transforms.probe_caches: input should be a mapping, not 3"),
        ("transforms:\n  probe_cachs:\n    stage: compile\n",
            "my.yaml:2: transforms.probe_cachs: unknown transform; did you mean 'probe_caches'?"),
        ("transforms:\n  on: {stage: compile}\n",
            "my.yaml:2: transforms.True: a field's name has to be text; quote it"),
        ("transforms:\n  probe_caches: {enabled: true}\n",
            "my.yaml:2: transforms.probe_caches: the field 'stage' is required"),
        ("transforms:\n  probe_caches:\n    stage: compile\n    enabled: [1]\n",
            "my.yaml:4: transforms.probe_caches.enabled: input should be a valid boolean, not [1]"),
        ("transforms:\n  rewrite_probes:\n    stage: compile\n    strategi: copy\n",
            "my.yaml:4: transforms.rewrite_probes.strategi: unknown field; did you mean 'strategy'?"),
        ("transforms:\n  rewrite_probes:\n    stage: cash_init\n", "my.yaml:3: transforms.rewrite_probes.stage: "
            "input should be 'factory', 'export', 'post_export', 'pattern_matcher', 'sharding', 'weight_load', "
            "'post_load_fusion', 'cache_init', 'visualize', 'export_onnx' or 'compile', not 'cash_init'; "
            "did you mean 'cache_init'?"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_its_line(write, text, expected):
    assert errors(write(text)) == [expected]


def test_all_problems_are_told_at_once_in_the_order_of_the_file(write):
    path = write(
        """\
        transforms:
          rewrite_probes: {stage: compile, strategi: copy}
        seed: x
        max_seq_length: 3
        """
    )
    assert errors(path) == [
        "my.yaml:2: transforms.rewrite_probes.strategi: unknown field; did you mean 'strategy'?",
        "my.yaml:3: seed: input should be a valid integer, not 'x'",
        "my.yaml:4: max_seq_length: unknown field; did you mean 'max_seq_len'?",
    ]


def test_the_line_is_that_of_the_file_that_gave_the_value(write):
    first = write("seed: 1\nmax_seq_len: 8\n", "first.yaml")
    second = write("max_seq_len: x\n", "second.yaml")
    assert errors(first, extra=[second]) == ["second.yaml:1: max_seq_len: input should be a valid integer, not 'x'"]


def test_a_wrong_override_is_named_as_such():
    assert errors("default", overrides={"speculative_config.max_draft_lan": 2}) == [
        "override 'speculative_config.max_draft_lan': speculative_config.max_draft_lan: unknown field; "
        "did you mean 'max_draft_len'?"
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("speculative_config:\n  decoding_type: MTP\n  max_draft_len: 32\n", 3),
        ("speculative_config: {max_draft_len: 32, decoding_type: MTP}\nkv_cache_config:\n  tokens_per_block: 32\n", 3),
    ],
)
def test_a_page_too_small_for_a_draft_names_both_keys(write, text, line):
    assert errors(write(text)) == [
        f"my.yaml:{line}: kv_cache_config.tokens_per_block is 32, but speculative_config.max_draft_len is 32 and a "
        "page must hold the 33 tokens of one step; raise kv_cache_config.tokens_per_block to 33 or lower "
        "speculative_config.max_draft_len"
    ]


def test_a_page_too_small_is_refused_without_yaml_too():
    with pytest.raises(ValidationError, match=r"kv_cache_config\.tokens_per_block is 3, but .*max_draft_len is 3"):
        EmbeddedConfig.model_validate(
            {
                "speculative_config": {"decoding_type": "MTP", "max_draft_len": 3},
                "kv_cache_config": {"tokens_per_block": 3},
            }
        )


# Broken files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nmodel_kwargs: {a: 1\n", "my.yaml:3: not valid YAML: expected ',' or '}', but got '<stream end>'"),
        ("seed: 1\n  max_seq_len: 2\n", "my.yaml:2: not valid YAML: mapping values are not allowed here"),
        ("seed: 1\n---\nseed: 2\n", "my.yaml:2: not valid YAML: but found another document"),
        ("seed: 1\nmodel: \x01\n", "my.yaml:2: not valid YAML: special characters are not allowed"),
        ("seed: !!python/name:os.x\n", "my.yaml:1: not valid YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/name:os.x'"),
        ("seed: 1\nmodel: a\nseed: 2\n", "my.yaml:3: the key 'seed' is given twice, first in line 1; keep one"),
        ("transforms:\n  probe_caches:\n    stage: compile\n    stage: export\n",
            "my.yaml:4: the key 'stage' is given twice, first in line 3; keep one"),
        ("- 1\n", "my.yaml:1: expected a mapping from field to value at the top level"),
        ("\nhello\n", "my.yaml:2: expected a mapping from field to value at the top level"),
        ("seed: 1\nmodel_kwargs: &a\n  b: [*a]\n", "my.yaml:2: the alias at 'model_kwargs.b.0' contains itself"),
        ("? [1]\n: 2\n", "my.yaml:1: a key has to be a name, not a list or a mapping"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named_with_the_line(write, text, expected):
    assert errors(write(text)) == [expected]


def test_a_missing_file_suggests_one_that_is_there(write):
    path = write("seed: 1\n")
    assert errors(path.with_name("mi.yaml")) == ["mi.yaml: no such file; did you mean 'my.yaml'?"]
    assert errors(path.parent / "none" / "x.yaml") == ["x.yaml: no such file"]


def test_an_unknown_name_suggests_one_that_ships():
    assert errors("defalt") == ["defalt: no config of this name; did you mean 'default'?"]
    assert errors("qqq") == [f"qqq: no config of this name; there are {', '.join(available_configs())}"]


def test_a_folder_and_a_file_that_is_not_text_cannot_be_read(tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    assert errors(tmp_path / "folder.yaml")[0].startswith("folder.yaml: cannot be read: ")
    assert errors(tmp_path / "binary.yaml")[0].startswith("binary.yaml: cannot be read: ")


# Documents --------------------------------------------------------------------------------------------------------


def test_a_merge_key_gives_way_to_the_mappings_own_keys():
    document = read_document("base: &b {x: 1, y: 2}\nmore:\n  <<: *b\n  y: 3\n", "f")
    assert document.value == {"base": {"x": 1, "y": 2}, "more": {"x": 1, "y": 3}}
    assert document.places["more", "y"].line == 4


def test_replacing_a_mapping_forgets_the_lines_in_it():
    merged = merge(read_document("a: {b: 1}\nc: 1\n", "first"), read_document("a: 2\n", "second"))
    assert merged.value == {"a": 2, "c": 1}
    assert {path: str(place) for path, place in merged.places.items()} == {
        (): "second",
        ("a",): "second:1",
        ("c",): "first:2",
    }


def test_later_overrides_add_to_earlier_ones():
    document = document_from_overrides({"a.b": 1, "a.c": {"d": 2}})
    assert document.value == {"a": {"b": 1, "c": {"d": 2}}}
    assert document.find(("a", "c", "d")) == (("a", "c"), document.places["a", "c"])
