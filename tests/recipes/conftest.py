import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors this small gain nothing from threads, and on a busy machine their barriers cost most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
