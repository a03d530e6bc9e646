"""The README's numbers are those of results/: nothing between its markers is typed."""
import re
import shutil
from pathlib import Path

import evaluate

ROOT = Path(__file__).resolve().parent.parent


def test_every_generated_block_is_what_the_results_give(tmp_path):
    shutil.copy(ROOT / "README.md", tmp_path / "README.md")
    evaluate.write_readme(tmp_path / "README.md", ROOT / "results")
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text(), \
        "README.md is not what results/ gives: run `python evaluate.py report --readme`"


def test_every_picture_and_script_it_names_is_there():
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"\]\(([^)h][^)]*)\)", text) + re.findall(r"python (\w+\.py|tests/\w+\.py)", text):
        assert (ROOT / name).exists(), name


def test_every_flag_it_names_exists():
    """Each `--flag` in a command of the README is one of its script's."""
    text = (ROOT / "README.md").read_text()
    for script, rest in re.findall(r"python (\w+\.py)((?: (?:--?[\w-]+|[\w./]+))*)", text):
        source = (ROOT / script).read_text()
        for flag in re.findall(r"--([\w-]+)", rest):
            names = (flag.replace("-", "_"), f'"--{flag}"', f'("{flag}"', f"'{flag}'", f'"{flag}"')
            assert any(n in source for n in names), f"{script} has no --{flag}"
