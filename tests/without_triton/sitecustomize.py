"""On PYTHONPATH, this hides Triton from a process: a machine without it, such as macOS or Windows."""

import importlib.util
import sys

sys.modules["triton"] = None
_find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name == "triton" else _find_spec(name, *args)
