"""Launchers under test run the interpreter that runs the tests, whether or not its environment is active."""

import os
import sys
import sysconfig
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def active_environment(tmp_path_factory: pytest.TempPathFactory):
    """Makes the running interpreter the active environment, and its scripts (shellcheck) the first on PATH."""
    environment = tmp_path_factory.mktemp("environment")
    python = environment / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')  # a link would lose the environment's packages
    python.chmod(0o755)
    scripts = Path(sysconfig.get_path("scripts"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VIRTUAL_ENV", str(environment))
        patch.setenv("PATH", f"{scripts}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
        yield
