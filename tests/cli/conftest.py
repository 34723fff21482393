"""What the tests of the commands that deal with the hub share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub
from machine import Machine


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub().running() as running:
        yield running


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Machine:
    """A machine with nothing on it, and a hub with nothing on it."""
    hub.forget()
    (tmp_path / "home").mkdir()
    return Machine(tmp_path / "home", hub)
