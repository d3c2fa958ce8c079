"""Captures forwards as graphs and replays them, and knows which of them contain host functions."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from ..hostfuncs import CapturedCalls, HostFuncOwner
from ..hostfuncs.launch import Graph


@dataclass
class _Entry:
    """A captured graph and the host functions in it."""

    graph: Graph
    captured: CapturedCalls


class GraphRunner:
    """Captured graphs by key.

    Args:
        owner: whose host functions the graphs contain; its layer captures and replays.

    Example:
        >>> runner = GraphRunner(owner)
        >>> runner.capture(8, lambda: model(cm))
        >>> output = runner.replay(8)
    """

    def __init__(self, owner: HostFuncOwner) -> None:
        self.owner = owner
        self._entries: dict[Hashable, _Entry] = {}
        # The driver holds captured calls by number: without this they would outlive a runner that is just dropped.
        weakref.finalize(self, _release, self._entries).atexit = False

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def capture(self, key: Hashable, function: Callable[[], Any], pool: Any = None) -> Any:
        """Capture `function` under a key; it must have run eagerly before, so that nothing is set up in a capture.

        Host functions in it are not run. Whatever it changes on the host, and on the CPU its tensors too, it changes
        once: set the batch up again before `replay`.

        Args:
            key: not in use yet.
            function: takes no arguments.
            pool: memory to share with other graphs, see `LaunchLayer.capture`.

        Returns:
            What `function` returned; replays write into its tensors.
        """
        if key in self._entries:
            raise ValueError(f"a graph is captured under {key!r} already: release it first")
        with self.owner.capture_hostfuncs() as captured:
            try:
                graph = self.owner.layer.capture(function, pool)
            except BaseException:
                captured.release()
                raise
        self._entries[key] = _Entry(graph, captured)
        return graph.result

    def replay(self, key: Hashable) -> Any:
        """Run a captured graph on the current stream; its host functions are pending until a drain.

        Returns:
            The captured result, whose tensors hold the replay's values once the stream has come so far.

        Raises:
            KeyError: nothing is captured under the key.
        """
        entry = self._entries[key]
        with self.owner.replaying(entry.captured):
            entry.graph.replay()
        return entry.graph.result

    def replayer(self, key: Hashable) -> Callable[[], object]:
        """What replays a graph with as little work on the host as possible.

        Raises:
            KeyError: nothing is captured under the key.
        """
        entry = self._entries[key]
        return functools.partial(self.replay, key) if entry.captured else entry.graph.replay

    def contains_hostfuncs(self, key: Hashable) -> bool:
        """Whether the graph captured under a key contains host functions."""
        return bool(self._entries[key].captured)

    def release(self) -> None:
        """Free all graphs, after what they have outstanding; their host functions' arguments are freed with them."""
        if any(entry.captured for entry in self._entries.values()):
            self.owner._wait()
        _release(self._entries)


def _release(entries: dict[Hashable, _Entry]) -> None:
    """Free graphs; a call that a replay may still make lives until that is over."""
    while entries:
        _, entry = entries.popitem()
        entry.captured.release()
