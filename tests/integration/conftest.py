"""One small Ray for the whole layer."""

import pytest
import ray


@pytest.fixture(scope="session", autouse=True)
def cluster():
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
