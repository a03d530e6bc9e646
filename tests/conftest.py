"""Shared by all test files: one cache for the embedded models, which take about a minute to make."""
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@pytest.fixture(scope="session", autouse=True)
def lethe_cache(tmp_path_factory):
    """The folder of LETHE_CACHE. One that is set already is used, so a second run of the tests finds its models there."""
    if "LETHE_CACHE" not in os.environ:
        os.environ["LETHE_CACHE"] = str(tmp_path_factory.mktemp("lethe"))
    return Path(os.environ["LETHE_CACHE"])


@pytest.fixture(scope="session")
def mini_news(lethe_cache):
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
