"""What the tests of the commands that deal with the hub share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub
from machine import Machine


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command that runs in this process has the program's log go to stderr, where later tests would not find it."""
    logger = logging.getLogger("tinyllm")
    before = [*logger.handlers], logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


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
