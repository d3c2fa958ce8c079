"""The embedded host's YAML configs: their fields, how they are merged, and errors that say where and what."""

from __future__ import annotations

import importlib.resources
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from ..spelling import suggestion
from .discovery import import_submodules
from .shim.interface import UNKNOWN_FIELD, KvCacheConfig
from .transform.interface import TransformRegistry
from .yaml_places import ConfigError, Document, KeyPath, Place, Problem, document_from_overrides, merge, read_document

__all__ = ["ConfigError", "EmbeddedConfig", "SpeculativeConfig", "available_configs", "load_config"]

#: A transform's field, and the top-level field that stands for it.
SHORTCUTS = {
    ("insert_cached_attention", "backend"): "attn_backend",
    ("insert_cached_attention", "draft_backend"): "draft_attn_backend",
    ("compile_model", "backend"): "compile_backend",
    ("check_capture", "compile_backend"): "compile_backend",
}

_DEFAULT = "default"
_BLOCK_KEY = ("kv_cache_config", "tokens_per_block")
_DRAFT_KEY = ("speculative_config", "max_draft_len")
_BLOCK_TOO_SMALL = "block_too_small"


class SpeculativeConfig(BaseModel):
    """How tokens are drafted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    decoding_type: Literal["Eagle3", "MTP"] | None = Field(
        default=None, description="The drafter's kind; null switches speculation off."
    )
    max_draft_len: int = Field(default=3, ge=1, description="Tokens drafted per step, typically 1 to 6.")
    speculative_model: str | None = Field(
        default=None, description="The drafter's checkpoint, given like `model`; null initialises one from the seed."
    )
    eagle3_layers_to_capture: list[int] | None = Field(
        default=None, description="The target's layers whose hidden states the drafter reads; null picks three."
    )


class EmbeddedConfig(BaseModel):
    """The top level of a config. An unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(
        default=None,
        description="A local Hugging Face directory, a GGUF file, or package://NAME/PATH for one that an installed "
        "package brings; null initialises a model from the seed.",
    )
    model_factory: str = Field(
        default="AutoModelForCausalLM", description="The key of the model factory in ModelFactoryRegistry."
    )
    model_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Fields of the target's transformers config that differ from its defaults."
    )
    speculative_config: SpeculativeConfig | None = Field(
        default=None, description="How tokens are drafted; null decodes one token at a time."
    )
    speculative_model_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Fields of the drafter's config that differ from its defaults."
    )
    attn_backend: str = Field(
        default="torch",
        min_length=1,
        description="The attention backend of the target: torch, torch_paged, triton, flashinfer (AttentionRegistry).",
    )
    draft_attn_backend: str | None = Field(
        default=None, min_length=1, description="The attention backend of the drafter; null takes the target's."
    )
    compile_backend: Literal["torch-simple", "torch-compile", "torch-cudagraph", "torch-opt"] = Field(
        default="torch-simple", description="How the model is compiled; torch-simple runs the graphs as they are."
    )
    max_seq_len: int = Field(default=256, ge=1, description="The longest sequence, prompt included, in tokens.")
    max_batch_size: int = Field(default=4, ge=1, description="The most sequences in one batch.")
    max_num_tokens: int = Field(default=512, ge=1, description="The most tokens in one batch.")
    kv_cache_config: KvCacheConfig = Field(
        default_factory=KvCacheConfig, description="The caches: tokens_per_block, dtype and so on."
    )
    world_size: int = Field(default=1, ge=0, description="How many ranks build the model; the embedded host uses one.")
    runtime: str = Field(default="embedded", description="Read by AutoDeploy; the embedded host has one runtime.")
    device: str = Field(default="cpu", description="Where the model runs: cpu, cuda or cuda:N.")
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = Field(
        default="float32", description="The type of weights and activations; greedy equality is promised for float32."
    )
    seed: int = Field(default=0, ge=0, lt=2**63 - 1, description="The seed of every random weight, and of sampling.")
    temperature: float = Field(
        default=0.0,
        ge=0.0,
        description="Above 0, tokens are drawn and drafts are verified by rejection sampling; 0 decodes greedily.",
    )
    prompt_style: Literal["plain", "chat"] = Field(
        default="plain", description="chat puts each text into the tokenizer's chat template, as a user's first turn."
    )
    prompts: list[str | list[int]] = Field(
        default_factory=list, description="What to decode: texts, or lists of token ids."
    )
    max_new_tokens: int = Field(default=32, ge=1, description="How many tokens to generate for each prompt.")
    transforms: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="The pipeline: from registry key to that transform's fields."
    )

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        problem = PydanticCustomError("device", "not a device; use cpu, cuda or cuda:N")
        try:
            kind = torch.device(value).type
        except RuntimeError as error:
            raise problem from error
        if kind not in ("cpu", "cuda"):
            raise problem
        return value

    @model_validator(mode="after")
    def _pages_hold_a_draft(self) -> EmbeddedConfig:
        """One offset moves a sequence by at most a page, so a page has to hold all the tokens of one step."""
        if self.speculative_config is None or self.speculative_config.decoding_type is None:
            return self
        drafted = self.speculative_config.max_draft_len
        tokens_per_block = self.kv_cache_config.tokens_per_block
        if tokens_per_block < drafted + 1:
            raise PydanticCustomError(
                _BLOCK_TOO_SMALL,
                "{block_key} is {block}, but {draft_key} is {drafted} and a page must hold the {needed} tokens of one "
                "step; raise {block_key} to {needed} or lower {draft_key}",
                {
                    "block_key": _dotted(_BLOCK_KEY),
                    "block": tokens_per_block,
                    "draft_key": _dotted(_DRAFT_KEY),
                    "drafted": drafted,
                    "needed": drafted + 1,
                },
            )
        return self

    @model_validator(mode="after")
    def _fill_shortcuts(self) -> EmbeddedConfig:
        """Hand the top level's backends to the transforms they stand for, unless those name their own.

        What is captured is checked as it is captured.
        """
        for (key, option), field in SHORTCUTS.items():
            value = getattr(self, field)
            if key in self.transforms and value is not None:
                self.transforms[key] = {option: value} | self.transforms[key]
        compiled, checked = self.transforms.get("compile_model", {}), self.transforms.get("check_capture")
        if checked is not None and "capture" in compiled:
            self.transforms["check_capture"] = {"capture": compiled["capture"]} | checked
        return self

    @property
    def torch_device(self) -> torch.device:
        """`device` as torch's own type."""
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch's own type."""
        return getattr(torch, self.dtype)

    @property
    def max_draft_len(self) -> int:
        """Tokens drafted per step; 0 without speculation."""
        spec = self.speculative_config
        return spec.max_draft_len if spec is not None and spec.decoding_type is not None else 0


def available_configs() -> tuple[str, ...]:
    """The names of the configs that come with the package, sorted."""
    folder = importlib.resources.files("auto_deploy_ext.configs") / "embedded"
    names = (entry.name for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    return tuple(sorted(name.removesuffix(".yaml") for name in names))


def load_config(
    name_or_path: str | os.PathLike[str],
    *,
    extra: Iterable[str | os.PathLike[str]] = (),
    overrides: Mapping[str, Any] | None = None,
) -> EmbeddedConfig:
    """Load a config, merged over ``default.yaml``, and check all of it.

    Mappings merge deeply, anything else replaces. A key that is new in `transforms` comes after the default's, so
    inside a stage the default's transforms run first.

    Args:
        name_or_path: the name of a config that comes with the package (see `available_configs`), or a YAML file; what
            has a directory separator or ends in ``.yaml`` or ``.yml`` is a file.
        extra: more of the same, merged on top in order.
        overrides: values by dotted key, merged on top of everything: ``{"speculative_config.max_draft_len": 2}``.

    Raises:
        ConfigError: a file is missing, is not YAML, is not a mapping, repeats a key, names an unknown field or
            transform, has a value of a wrong type, or has pages too small for a draft. Every line of the message names
            file, line and key, and a name that was probably meant.
    """
    _register_transforms()
    documents = [_read(source) for source in (_DEFAULT, name_or_path, *extra)]
    if overrides:
        documents.append(document_from_overrides(overrides))
    merged = documents[0]
    for document in documents[1:]:
        merged = merge(merged, document)
    order = [document.places[()].file for document in documents]
    problems = [*_transform_problems(merged), *_non_text_keys(merged)]
    config: EmbeddedConfig | None = None
    try:
        config = EmbeddedConfig.model_validate(merged.value)
    except ValidationError as error:
        problems = [*_describe(error, merged, (), EmbeddedConfig, order), *problems]
    if problems or config is None:
        raise ConfigError(sorted(_joined(problems), key=lambda problem: _reading_order(problem, order)))
    return config


def _register_transforms() -> None:
    """Import whatever registers a transform that a config may name."""
    import_submodules("auto_deploy_ext.embedded.transform.library")
    import_submodules("auto_deploy_ext.transforms")


def _read(source: str | os.PathLike[str]) -> Document:
    text = os.fspath(source)
    is_file = os.sep in text or "/" in text or text.endswith((".yaml", ".yml"))
    if not is_file and text not in available_configs():
        names = available_configs()
        hint = suggestion(text, names, otherwise=f"there are {', '.join(names)}")
        raise ConfigError([Problem(Place(text), "", f"no config of this name{hint}")])
    path = Path(text) if is_file else importlib.resources.files("auto_deploy_ext.configs") / "embedded" / f"{text}.yaml"
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        hint = ""
        if isinstance(path, Path) and path.parent.is_dir():
            hint = suggestion(path.name, [entry.name for entry in path.parent.iterdir()])
        raise ConfigError([Problem(Place(str(path)), "", f"no such file{hint}")]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(Place(str(path)), "", f"cannot be read: {error}")]) from error
    return read_document(content, str(path))


def _transform_problems(document: Document) -> list[Problem]:
    transforms = document.value.get("transforms")
    problems: list[Problem] = []
    for key, fields in transforms.items() if isinstance(transforms, dict) else ():
        path = ("transforms", key)
        if not isinstance(key, str):
            continue  # what _non_text_keys reports
        if not TransformRegistry.has(key):
            hint = suggestion(key, TransformRegistry.keys())
            problems.append(Problem(document.places[path], _dotted(path), f"unknown transform{hint}"))
        elif isinstance(fields, dict) and all(isinstance(name, str) for name in fields):
            config_class = TransformRegistry.get_config_class(key)
            try:
                config_class.model_validate(fields)
            except ValidationError as error:
                problems += _describe(error, document, path, config_class, [])
    return problems


def _non_text_keys(document: Document) -> list[Problem]:
    """YAML reads a bare ``on`` as true and ``1`` as a number: neither is a field's name."""
    transforms = document.value.get("transforms")
    mappings: dict[KeyPath, Any] = {(): document.value, ("transforms",): transforms}
    if isinstance(transforms, dict):
        mappings |= {("transforms", key): fields for key, fields in transforms.items()}
    return [
        Problem(document.places[(*path, key)], _dotted((*path, key)), "a field's name has to be text; quote it")
        for path, mapping in mappings.items()
        for key in (mapping if isinstance(mapping, dict) else ())
        if not isinstance(key, str)
    ]


def _describe(
    error: ValidationError, document: Document, prefix: KeyPath, model: type[BaseModel], order: list[str]
) -> list[Problem]:
    """A problem for each of pydantic's errors about the part of the document at `prefix`."""
    problems = []
    for detail in error.errors(include_url=False):
        path, place = document.find((*prefix, *detail["loc"]))
        if detail["type"] == "invalid_key" or detail["loc"][-1:] == ("[key]",):
            continue  # what _non_text_keys reports
        if detail["type"] == _BLOCK_TOO_SMALL:
            places = [document.find(key)[1] for key in (_BLOCK_KEY, _DRAFT_KEY)]
            place = max(places, key=lambda place: order.index(place.file) if place.file in order else len(order))
        problems.append(Problem(place, _dotted(path), _message(detail, model)))
    return problems


def _message(detail: ErrorDetails, model: type[BaseModel]) -> str:
    name = str(detail["loc"][-1]) if detail["loc"] else ""
    if detail["type"] == "extra_forbidden":
        return f"unknown field{suggestion(name, _fields_at(model, detail['loc'][:-1]))}"
    if detail["type"] == "missing":
        return f"the field {name!r} is required"
    if detail["type"] in (_BLOCK_TOO_SMALL, UNKNOWN_FIELD):
        return detail["msg"]
    if detail["type"] in ("dict_type", "model_type"):
        return f"input should be a mapping, not {_shown(detail['input'])}"
    message = f"{detail['msg'][:1].lower()}{detail['msg'][1:]}, not {_shown(detail['input'])}"
    if detail["type"] in ("literal_error", "enum"):
        message += suggestion(str(detail["input"]), re.findall(r"'([^']*)'", detail["ctx"]["expected"]))
    return message


def _fields_at(model: type[BaseModel], loc: KeyPath) -> list[str]:
    """The names of the fields of the model that stands at `loc` inside `model`."""
    for name in loc:
        annotation = model.model_fields[name].annotation
        candidates = (annotation, *getattr(annotation, "__args__", ()))
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(model.model_fields)


def _joined(problems: list[Problem]) -> list[Problem]:
    """One problem per place: pydantic lists each member of a union that a value does not fit."""
    joined: dict[tuple[Place, str], Problem] = {}
    for problem in problems:
        where = (problem.place, problem.path)
        if where in joined:
            known = joined[where]
            if problem.message not in known.message:
                joined[where] = Problem(known.place, known.path, f"{known.message}; or {problem.message}")
        else:
            joined[where] = problem
    return list(joined.values())


def _reading_order(problem: Problem, files: list[str]) -> tuple[int, int]:
    place = problem.place
    return (files.index(place.file) if place.file in files else len(files)), place.line or 0


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))
