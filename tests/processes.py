"""Run Python in a fresh process, where nothing is imported and no interpreter is switched on."""

import os
import subprocess
import sys
from pathlib import Path

WITHOUT_TRITON = Path(__file__).with_name("without_triton")


def python(*arguments, without_triton=False):
    """Run ``python *arguments``, assert that it succeeds, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if without_triton:
        environment["PYTHONPATH"] = os.pathsep.join([str(WITHOUT_TRITON), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()
