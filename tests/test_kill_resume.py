"""A selection of kill_resume.py, which holds the whole of it and is run by hand."""
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="kill_resume.py forks")
def test_killed_runs_resume_to_the_same_bits_and_refusals_lose_nothing():
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("kill_resume.py")), "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was lost" in done.stdout             # whether a kill met a checkpoint half written is chance; RLIMIT_FSIZE always does
    assert done.stdout.count("equal bits") >= 2 and "RLIMIT_FSIZE" in done.stdout
