"""YAML as values plus the file and line of each one, so that an error about a value can point at it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

KeyPath = tuple[Any, ...]
_MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass(frozen=True)
class Place:
    """Where a value was written: a file, or a description of another origin, and a line counted from 1."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config: its place, the dotted path of the key, and what to do."""

    place: Place
    path: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.place), self.path, self.message) if part)


class ConfigError(ValueError):
    """A config that cannot be used. The message has a line for each of `problems`."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


@dataclass(frozen=True)
class Document:
    """A mapping, with the place of each value in it by the path of keys and list indices that leads there."""

    value: dict[Any, Any]
    places: dict[KeyPath, Place]

    def find(self, path: KeyPath) -> tuple[KeyPath, Place]:
        """The longest part of `path` that exists in the document, and its place."""
        while path not in self.places:
            path = path[:-1]
        return path, self.places[path]


def read_document(text: str, file: str) -> Document:
    """Parse a YAML file's text; an empty file is an empty mapping.

    Raises:
        ConfigError: a syntax error, a duplicate key, a key that is a collection, an alias that contains itself, or
            content that is not a mapping.
    """
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return Document({}, {(): Place(file)})
            if not isinstance(node, yaml.MappingNode):
                raise _error(file, node, "expected a mapping from field to value at the top level")
            places: dict[KeyPath, Place] = {}
            value = _Reader(loader, file, places).read(node, (), node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        raise ConfigError([Problem(Place(file, line), "", f"not valid YAML: {error.problem}")]) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError([Problem(Place(file, line), "", f"not valid YAML: {error.reason}")]) from error
    places[()] = Place(file)
    return Document(value, places)


class _Reader:
    """Constructs plain values from one file's nodes and notes where each one stands."""

    def __init__(self, loader: yaml.SafeLoader, file: str, places: dict[KeyPath, Place]) -> None:
        self._loader = loader
        self._file = file
        self._places = places
        self._open: list[yaml.Node] = []

    def read(self, node: yaml.Node, path: KeyPath, at: yaml.Node) -> Any:
        """The value of `node`; its place is the line of `at`, the key in front of it where there is one."""
        if any(node is parent for parent in self._open):
            raise _error(self._file, node, f"the alias at {_dotted(path)!r} contains itself")
        self._places[path] = Place(self._file, at.start_mark.line + 1)
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.read(item, (*path, index), item) for index, item in enumerate(node.value)]
            return self._loader.construct_object(node, deep=True)
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[Any, Any]:
        self._reject_duplicates(node)
        self._loader.flatten_mapping(node)
        # Flattening puts what `<<` brings in front of the mapping's own keys, so the own ones win.
        return {
            self._key(key): self.read(value, (*path, self._key(key)), key if _inside(key, node) else node)
            for key, value in node.value
        }

    def _key(self, node: yaml.Node) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            raise _error(self._file, node, "a key has to be a name, not a list or a mapping")
        return self._loader.construct_object(node)

    def _reject_duplicates(self, node: yaml.MappingNode) -> None:
        first: dict[Any, yaml.Node] = {}
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            key = self._key(key_node)
            if key in first:
                line = first[key].start_mark.line + 1
                raise _error(self._file, key_node, f"the key {key!r} is given twice, first in line {line}; keep one")
            first[key] = key_node


def _inside(inner: yaml.Node, outer: yaml.Node) -> bool:
    return outer.start_mark.index <= inner.start_mark.index < outer.end_mark.index


def _error(file: str, node: yaml.Node, message: str) -> ConfigError:
    return ConfigError([Problem(Place(file, node.start_mark.line + 1), "", message)])


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def document_from_overrides(overrides: Mapping[str, Any]) -> Document:
    """A document from dotted keys, ``{"kv_cache_config.tokens_per_block": 8}``; a later key adds to earlier ones."""
    document = Document({}, {(): Place("overrides")})
    for dotted, value in overrides.items():
        keys = tuple(dotted.split("."))
        place = Place(f"override {dotted!r}")
        nested: Any = value
        for key in reversed(keys):
            nested = {key: nested}
        document = merge(document, Document(nested, {keys[:length]: place for length in range(len(keys) + 1)}))
    return document


def merge(base: Document, over: Document) -> Document:
    """`over` on top of `base`: mappings merge key by key, anything else replaces; new keys come after the old ones."""
    places = dict(base.places)
    value = _merge(base.value, over.value, (), places, over.places)
    return Document(value, places)


def _merge(base: Any, over: Any, path: KeyPath, places: dict[KeyPath, Place], new: dict[KeyPath, Place]) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        if path in new:
            places[path] = new[path]
        merged = dict(base)
        for key, value in over.items():
            below = (*path, key)
            merged[key] = _merge(base[key], value, below, places, new) if key in base else value
            if key not in base:
                places.update(_under(below, new))
        return merged
    for old in _under(path, places):
        del places[old]
    places.update(_under(path, new))
    return over


def _under(path: KeyPath, places: dict[KeyPath, Place]) -> dict[KeyPath, Place]:
    return {key: place for key, place in places.items() if key[: len(path)] == path}
