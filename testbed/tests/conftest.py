"""Fixtures: each test has its own run, whose namespaces and processes are gone when it ends.

The logs of a test that failed stay in `out/tests/<test>/`.
"""

from __future__ import annotations

import os

import pytest

from tidelock_testbed.image import GuestImage, guest_image
from tidelock_testbed.net import Net
from tidelock_testbed.run import Run


def pytest_configure(config):
    """Refuses to start where every test would fail for the same reason."""
    if os.geteuid() != 0:
        pytest.exit("the testbed makes network namespaces: run it as root", returncode=2)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Lets the fixtures know whether the test failed."""
    outcome = yield
    if call.when == "call":
        item.failed = outcome.get_result().failed


@pytest.fixture
def run(request):
    """The test's run."""
    name = request.node.name.replace("/", "_").replace("[", "-").replace("]", "")
    this = Run(f"tests/{name}", keep=False)
    yield this
    this.close(well=not getattr(request.node, "failed", True))


@pytest.fixture
def net(run) -> Net:
    """Two sites and the clients, without delay."""
    return Net(run)


@pytest.fixture(scope="session")
def image() -> GuestImage:
    """The guest's image, built once."""
    return guest_image()
