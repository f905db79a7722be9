"""The page "Which call should I use?": its code runs, its calls agree, and what its tables name exists."""

import re
from pathlib import Path

import pytest
import torch

import flashattn
from flashattn import attention_reference
from flashattn.testing import relative_errors

PAGE = (Path(__file__).parent.parent / "book" / "which_call.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)


@pytest.mark.triton
def test_the_code_runs_and_the_calls_agree():
    pytest.importorskip("transformers")
    names = {}
    torch.manual_seed(0)
    for block in BLOCKS:
        exec(block, names)
    q, k, v = (names[name].detach() for name in "qkv")
    expected = attention_reference(q.float(), k.float(), v.float(), causal=True)[0]
    close = dict(rtol=2e-3, atol=2e-3)
    for name in ("out", "out_masked"):
        torch.testing.assert_close(names[name].float(), expected, **close)
    assert relative_errors(names["out_e4m3"], expected)[0] < 0.08
    for begin, end in ((0, 20), (20, 32)):
        rows = (x[:1, :, begin:end].float() for x in (q, k, v))
        one = attention_reference(*rows, causal=True)[0]
        torch.testing.assert_close(names["out_sparse"][:1, :, begin:end].float(), one, **close)
        rows = (x[:1, :, begin:end].float() for x in (q, k, v))
        one = attention_reference(*rows, causal=True)[0]
        torch.testing.assert_close(names["out_rows"][begin:end].transpose(0, 1).float(), one[0], **close)
    torch.testing.assert_close(names["out_newest"].float(), expected[:, :, -1:], **close)
    assert torch.equal(names["out_newest"], names["out_pages"])
    assert names["answer"].shape == (1, 12)
    assert all(names[name].grad is not None for name in "qkv")
    assert names["y"].shape == names["x"].shape
    assert torch.equal(names["y"][0, 20:], names["layer"].out_proj.bias.expand(12, -1))
    for name, weight in names["theirs"].state_dict().items():
        assert torch.equal(names["back"].state_dict()[name], weight)
    assert names["logits"].shape == (1, 8, 50) and names["logits"].isfinite().all()


def test_every_call_has_a_row_and_a_block():
    """The table names every public call but the reference, which is not for use; each but the slow one has code."""
    table = PAGE.split("\n\n")[2]
    for name in flashattn.__all__:
        if name != "attention_reference":
            assert f"<flashattn.{name}>" in table, name
        if not name.startswith("attention_"):
            assert any(re.search(rf"import (\w+, )*{name}\b", block) for block in BLOCKS), name


def test_roles_name_what_exists():
    for name in re.findall(r"<flashattn\.(\w+)>", PAGE):
        assert hasattr(flashattn, name), name
