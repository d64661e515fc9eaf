"""How the benchmarks are started here."""

import os

# Within a test that pytest-xdist runs, pytest-benchmark would take the program for one of its workers.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
