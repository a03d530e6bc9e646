"""Shared by all test files: one cache for the embedded models, which take about a minute to make."""
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def pytest_configure(config):
    """One LETHE_CACHE for all processes of `-n`, which inherit it; one that is set already is used, so a second run of
    the tests finds its models there. One thread each: two processes with two threads on two cores wait for each other."""
    if "LETHE_CACHE" not in os.environ:
        config.lethe_cache = tempfile.TemporaryDirectory(prefix="lethe-")    # gone with the run
        os.environ["LETHE_CACHE"] = config.lethe_cache.name
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def mini_news():
    """The embedded benchmark with its models made: bench.models holds base, target, retrain and tokenizer."""
    import evaluate
    bench = evaluate.load_bench("mini_news")
    bench.models = evaluate.resolve_models(bench)
    return bench


def pytest_terminal_summary(terminalreporter):
    """How many tests compared us with numbers that public code gave: their names hold "golden"."""
    counts = {outcome: sum("golden" in r.nodeid for r in terminalreporter.stats.get(outcome, []))
              for outcome in ("passed", "failed", "skipped")}      # a passed test is there once: pytest keeps its call only
    terminalreporter.write_line("golden tests: " + ", ".join(f"{n} {outcome}" for outcome, n in counts.items()))
