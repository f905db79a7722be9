"""The import directions of the package, read from its source (imports inside functions count too)."""

import ast
from pathlib import Path

import flashattn

PACKAGE = Path(flashattn.__file__).parent
# module -> the modules of the package it may import
MAY_IMPORT = {
    "__init__": {"api", "decode", "fp8", "module", "paged", "reference", "tiled"},
    "reference": set(),
    "derivative": set(),
    "tiled": {"reference", "derivative"},
    "testing": {"reference"},
    "primitives": set(),
    "configs": set(),
    "launch": set(),
    "forward": {"primitives", "configs", "launch"},
    "backward": {"primitives", "configs", "launch"},
    "hopper": {"configs", "launch", "primitives"},
    "hopper_backward": {"backward", "configs", "hopper", "launch", "primitives"},
    "backends": {"backward", "configs", "forward", "hopper", "hopper_backward", "primitives"},
    "atomic": {"backward", "configs", "launch", "ops", "primitives"},
    "ops": {"backends", "forward", "backward", "primitives", "derivative"},
    "api": {"backends", "ops"},
    "masks": {"primitives"},
    "sparse": {"api", "backward", "configs", "derivative", "launch", "masks", "ops", "primitives"},
    "module": {"api"},
    "decode_kernels": {"configs", "primitives", "splits"},
    "decode": {"api", "decode_kernels", "ops"},
    "paged": {"api", "decode"},
    "fp8": {"api", "configs", "fp8_kernel", "ops", "primitives", "reference"},
    "fp8_kernel": {"configs", "launch", "primitives"},
    "integrations.__init__": set(),
    "integrations.paged_cache": {"paged"},
    "integrations.transformers": {"api", "module", "ops", "paged_cache"},
    "cost": set(),
    "splits": set(),
    "streaming": set(),
    "peers": {"api", "atomic", "decode", "fp8", "masks", "sparse", "streaming"},
    "fp8_bench": {"api", "fp8", "reference", "testing"},
    "memory": set(),
    "gpt": {"peers"},
    "models": {"gpt", "memory"},
    "bench": {"fp8_bench", "memory", "models", "peers", "testing"},
    "train": {"bench", "gpt", "testing"},
    "ring": {"api", "backward", "derivative", "forward", "ops"},
    "ring_bench": {"api", "bench", "memory", "models", "peers", "reference", "ring", "testing"},
    "goals": {"bench", "cost"},
    "explorer": {"figures"},
    "interactive": {"cost", "figures", "splits"},
    "doctor": {"api", "configs", "testing", "tiled"},
    "figures": {"cost"},
    "fuzz": {"api", "notebook", "reference", "testing"},
    "notebook": set(),
    "tune": {"api", "backward", "forward", "launch", "testing"},
}
WITHOUT_TRITON = {
    "reference",
    "tiled",
    "cost",
    "testing",
    "figures",
    "explorer",
    "interactive",
    "api",
    "decode",
    "fp8",
    "doctor",
    "goals",
    "module",
    "paged",
    "splits",
    "peers",
    "memory",
    "gpt",
    "models",
    "train",
    "__init__",
}
MAY_PLOT = {"figures", "explorer", "notebook"}


def imports(path):
    """Return (modules of the package, outside packages) that a file imports."""
    inside, outside = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            inside |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            outside.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
    return inside, outside


def test_directions():
    files = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    assert set(files) == set(MAY_IMPORT), "a module was added or removed: say here what it may import"
    for name, path in files.items():
        inside, outside = imports(path)
        assert inside <= MAY_IMPORT[name], f"{name} imports {inside - MAY_IMPORT[name]}"
        assert "transformers" not in outside or name.startswith("integrations.")
        assert "flashattn" not in outside and "tests" not in outside and "notebooks" not in outside, name
        if name in WITHOUT_TRITON:
            assert "triton" not in outside, name
        if name not in MAY_PLOT:
            assert not outside & {"matplotlib", "ipywidgets", "IPython"}, name
    assert "torch" not in imports(files["cost"])[1]
