"""Root pytest settings: collect each file once, under its import name; one thread a worker; hypothesis profiles."""

import os

from hypothesis import HealthCheck, settings

collect_ignore = ["compiler", "grammar", "passes", "runtime"]  # reached as parc/compiler, …

os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share few cores: one thread each is faster, and repeatable

SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile("check", deadline=None, derandomize=True, suppress_health_check=SLOW_IS_FINE)
settings.register_profile("fuzz", deadline=None, max_examples=2000, print_blob=True, suppress_health_check=SLOW_IS_FINE)
settings.load_profile("check")
