import pytest
from rollout_builders import write_checkpoint


@pytest.fixture(scope="session")
def qwen2_folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2")
