"""One small Ray for the whole layer, or for each process of pytest-xdist."""

import os

import pytest
import ray

# Ray would ask for a token of its own making, which a node that a test adds does not have.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# Five refused health checks are the death of a node. By default that takes Ray 15 to 40 s; a slow answer is no refusal.
os.environ.setdefault("RAY_health_check_initial_delay_ms", "200")
os.environ.setdefault("RAY_health_check_period_ms", "200")


@pytest.fixture(scope="session", autouse=True)
def cluster():
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
