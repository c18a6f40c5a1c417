"""What tests of compiled steps share: Dynamo without memory, one machine's prices, no options from outside."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from oracle import TEST_SPEC

# pytest listens to every logger that does not propagate, and torch writes each compile stage to one as soon as somebody
# listens: slow, and thousands of lines in the report of a failing test.
logging.getLogger("torch.__trace").propagate = True


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No option from the environment but the tests' device spec, and nothing that Dynamo remembers."""
    for name in [name for name in os.environ if name.startswith("REMAT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("REMAT_DEVICE_SPEC", str(device_spec_file(tmp_path_factory)))
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def device_spec_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the tests' device spec, written once a session."""
    path = tmp_path_factory.getbasetemp() / "device.json"
    if not path.exists():
        path.write_text(TEST_SPEC.to_json(), encoding="utf-8")
    return path
