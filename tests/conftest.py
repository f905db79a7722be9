"""Set-up for the package's tests: the interpreter where there is no GPU, and poisoned memory."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import flashattn.notebook  # noqa: E402, I001  first: it switches the interpreter on where there is no GPU
import pytest  # noqa: E402
import torch  # noqa: E402


if os.environ.get("TEST_SHORT_CALLS") == "hopper":  # where they can run them, calls too short for them to be faster too
    import flashattn.backends

    flashattn.backends.SCORES_WORTH_IT = 0


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill what torch.empty and its kin return with NaN, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device():
    """Return the device the kernels run on here."""
    return flashattn.notebook.device


def pytest_collection_modifyitems(config, items):
    """Leave out tests that need more GPUs than there are; skip kernel tests, with the reason, without Triton."""
    for marker, n_gpus in (("gpu", 1), ("two_gpus", 2)):
        if torch.cuda.device_count() < n_gpus:
            config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(marker)])
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
    if not flashattn.notebook.HAS_TRITON:
        for item in items:
            if item.get_closest_marker("triton"):
                item.add_marker(pytest.mark.skip(reason="Triton is not installed on this platform"))
