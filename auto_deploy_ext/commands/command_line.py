"""What the commands share: types and checks of arguments, and how many threads they use; imports nothing heavy."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..spelling import unknown_name_message

#: what a file's name ends in until it is complete.
PART = ".part"


def positive(text: str) -> int:
    """A whole number of at least 1, as a type for argparse.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def finite(text: str) -> float | None:
    """The finite number that a text is; None: it is none, and the argument's type says what it has to be."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def one_of(kind: str, names: Iterable[str]) -> Callable[[str], str]:
    """A type for argparse: one of some names; another one is answered with the closest of them.

    Args:
        kind: what they are names of.
        names: of which there is one at least.

    Raises:
        argparse.ArgumentTypeError: by the type, for another name.
    """
    known = tuple(names)

    def name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(unknown_name_message(kind, text, known))
        return text

    return name


def options_besides(kept: Container[str], said: argparse.Namespace, unsaid: argparse.Namespace) -> str:
    """The options that a command line has besides some, as a user writes them; empty if there are none.

    Args:
        kept: names of attributes that do not count.
        said: the parsed command line.
        unsaid: what the same parser gives where no option is said.
    """
    known = vars(unsaid)
    found = [name for name, value in vars(said).items() if name not in kept and value != known.get(name, value)]
    return ", ".join("--" + name.replace("_", "-") for name in sorted(found))


def check_gpu(parser: argparse.ArgumentParser, option: str, instead: str) -> None:
    """End a command with exit code 2 where an option asks for a GPU and PyTorch finds none.

    Args:
        parser: the command's.
        option: the option, as it was said.
        instead: what does without.
    """
    import torch

    if not torch.cuda.is_available():
        parser.error(f"{option}: PyTorch finds no GPU here; {instead} does without")


def writable(text: str) -> Path:
    """A file that can be written in the end, as a type for argparse.

    Raises:
        argparse.ArgumentTypeError: it cannot.
    """
    reason = why_not_writable(Path(text))
    if reason is not None:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {reason}; name another file")
    return Path(text)


def why_not_writable(path: Path, is_folder: bool = False) -> str | None:
    """Why a file, or files in a folder, could not be written in the end; None: they can. Nothing is made."""
    path = Path(os.path.realpath(path))
    try:
        # A file is written beside its place first. What is too long, say, cannot even be looked for.
        path.with_name(f"{path.name}{PART}").exists()
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    if path.is_symlink():
        return "it is a link that leads to itself"
    folder = next((parent for parent in path.absolute().parents if parent.exists()), path)
    if is_folder and path.exists():
        folder = path
    # What is there already is replaced as a whole, unless it is a device or a pipe.
    places = [place for place in (path, folder) if place.exists()]
    places = places[:1] if path.exists() and not path.is_file() else places
    locked = next((place for place in places if not os.access(place, os.W_OK)), None)
    if path.is_dir() and not is_folder:
        return "it is a directory"
    if not folder.is_dir():
        return f"{folder} is not a directory"
    if locked is not None:
        return f"{locked} may not be written"
    if is_folder or not path.exists() or path.is_file():
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            return f"{folder} takes no files ({error.strerror or error})"
    return None


@contextmanager
def one_thread(wanted: bool) -> Iterator[None]:
    """Compute on one CPU thread inside, if that is wanted and the environment does not say how many."""
    import torch

    before = torch.get_num_threads()
    if wanted and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
