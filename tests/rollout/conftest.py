import pytest
from rollout_builders import PAGE, write_checkpoint

from qerl.rollout import engine as engine_module


@pytest.fixture(scope="session")
def qwen2_folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture
def small_pages(monkeypatch):
    """Pages of a few tokens, so that tiny sequences have several."""
    monkeypatch.setattr(engine_module, "PAGE_TOKENS", PAGE)
