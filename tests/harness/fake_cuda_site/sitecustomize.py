"""Fake CUDA devices in a child process: put this folder on PYTHONPATH and the machine's JSON into OPCAST_FAKE_CUDA."""

import os

if "OPCAST_FAKE_CUDA" in os.environ:
    import pytest

    from opcast.tests.harness.fake_cuda import from_json, install

    install(from_json(os.environ["OPCAST_FAKE_CUDA"]), pytest.MonkeyPatch())
