import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Layers this small lose more by waiting for a second thread than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
