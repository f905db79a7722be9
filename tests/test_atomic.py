"""The backward pass with atomic adds, which is measured beside the package's own: it has to be right to be compared."""

import pytest
import torch

from flashattn import flash_attention
from flashattn.atomic import attention_atomic
from flashattn.testing import Case, error_ratios, make_inputs

pytestmark = pytest.mark.triton


@pytest.mark.parametrize(
    "case",
    [
        Case(70, 70, 64, "fp16", True, 2, 2),
        Case(50, 90, 64, "bf16", True, 2, 2),
        Case(130, 70, 40, "fp16", False, 4, 2),
        Case(70, 33, 128, "bf16", False, 2, 1),
    ],
    ids=lambda case: case.id,
)
def test_gradients_are_within_the_budget(case, device):
    def attend(q, k, v, causal):
        lse = flash_attention(q, k, v, causal=causal, return_lse=True)[1]
        return attention_atomic(q, k, v, causal=causal), lse.detach()

    inputs = make_inputs(case, device)._replace(dlse=None)
    ratios = error_ratios(attend, inputs, causal=case.causal)
    assert {"out", "dq", "dk", "dv"} <= set(ratios)
    assert max(ratios.values()) <= 1, ratios


def test_other_dtypes_are_refused():
    q = torch.randn(1, 1, 8, 16)
    with pytest.raises(TypeError, match="`q` must be float16 or bfloat16, got float32"):
        attention_atomic(q, q, q)
