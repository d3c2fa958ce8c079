"""Tickets of operands on their way to the host: what they give stays, and what their copies use is used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from auto_deploy_ext.runtime import replay
from auto_deploy_ext.runtime.mirrors import Transfer
from auto_deploy_ext.runtime.replay import OperandTicket


class Event:
    """An event that happens when it is told to."""

    made = 0

    def __init__(self) -> None:
        Event.made += 1
        self.happened = False
        self.records = 0

    def record(self, stream: Any) -> None:
        self.records += 1
        self.happened = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.happened = True


class Stream:
    """A side stream on which copies are made at once."""

    def wait_event(self, event: Event) -> None:
        assert event.records % 2 == 1, "it follows the operand's own stream"

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A lane with stand-ins for what only a GPU has."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append(self))
    recorded.clear()
    Event.made = 0
    return replay._Lane(Stream(), pinned=False)  # type: ignore[arg-type]


recorded: list[torch.Tensor] = []


def ticket(lane: Any, *values: int) -> tuple[OperandTicket, Any]:
    landing, flight = lane.start(torch.tensor(values, dtype=torch.int32))
    return OperandTicket(Transfer(("offset",), 4 * len(values), False, "offset"), landing, flight), flight


def test_values_stay_when_the_next_operand_lands_in_the_same_place(lane: Any) -> None:
    areas = set()
    for round_ in range(4):
        first, flight = ticket(lane, round_, 7)
        areas.add(flight.area.data_ptr())
        given = first.wait()
        assert first.transfer.waited
        second, other = ticket(lane, 8, 9)
        areas.add(other.area.data_ptr())
        other.event.happened = True
        assert second.wait().tolist() == [8, 9] and not second.transfer.waited
        assert given.tolist() == [round_, 7] and first.wait() is given
    assert len(areas) == 1 and Event.made == 1 and not recorded


def test_operands_under_way_at_the_same_time_land_apart(lane: Any) -> None:
    first, second = ticket(lane, 1, 2)[0], ticket(lane, 3)[0]
    assert (second.wait().tolist(), first.wait().tolist()) == ([3], [1, 2])
    assert Event.made == 2


def test_what_a_ticket_that_nobody_waits_for_uses_is_used_again_when_its_copy_is_over(lane: Any) -> None:
    dropped, flight = ticket(lane, 1)
    area, event, source = flight.area, flight.event, flight.source
    del dropped, flight
    assert len(recorded) == 1 and recorded[0] is source, "the device's memory outlives the copy too"
    other = ticket(lane, 2)
    assert other[1].area is not area and other[1].event is not event
    event.happened = True
    assert ticket(lane, 3)[1].area is area
