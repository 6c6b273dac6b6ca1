"""What the adapters' tests share."""

import sys
import warnings

import fused_libraries as fused
import pytest


@pytest.fixture(scope="session", autouse=True)
def _transformers_imported():
    """Imported once, before pytest turns warnings to errors: what transformers warns of while it is imported is its
    own; and what it logs of tiny models, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import PreTrainedModel
        from transformers.utils import logging

    assert PreTrainedModel
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


@pytest.fixture
def flash(monkeypatch):
    for name, module in fused.flash_attn().items():
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["flash_attn"]


@pytest.fixture
def xformers(monkeypatch):
    for name, module in fused.xformers().items():
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["xformers.ops"]


@pytest.fixture(scope="session")
def varlen():
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(fused.varlen_on_a_cpu)
    return varlen.varlen_attn


@pytest.fixture
def untraced_flex(monkeypatch):
    """flex_attention without PyTorch's compiler, as it is debugged; its gradients are wrong then."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
