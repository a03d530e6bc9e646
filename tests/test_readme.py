"""The README: its numbers are those of results/, its commands run, its files and flags exist."""
import dis
import importlib
import inspect
import re
import shutil
import sys
from pathlib import Path

import pytest

import evaluate
import make_tables

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_every_table_is_what_the_results_give(tmp_path):
    make_tables.main(tmp_path)
    for name in make_tables.TABLES:
        assert (tmp_path / f"{name}.md").read_text() == (ROOT / "results" / "tables" / f"{name}.md").read_text(), \
            f"{name}: run `python tests/make_tables.py && python evaluate.py report --readme`"
    shutil.copy(ROOT / "README.md", tmp_path / "README.md")
    evaluate.write_readme(tmp_path / "README.md", ROOT / "results")
    assert (tmp_path / "README.md").read_text() == TEXT, "run `python evaluate.py report --readme`"
    assert set(re.findall(r"<!-- begin: (\w+) -->", TEXT)) == set(make_tables.TABLES)


def test_every_picture_and_script_it_names_is_there():
    for name in re.findall(r"\]\(([^)h][^)]*)\)", TEXT) + re.findall(r"python (\w+\.py|tests/\w+\.py)", TEXT):
        assert (ROOT / name).exists(), name


def test_every_function_it_offers_runs_behind_the_lines_it_names():
    """What the copied sources take from their module stands in the row: the lines in front, or the other functions of it."""
    rows = re.findall(r"\| `(\w+)\.(\w+)`(.*?) \| `(import .*?)` \|", TEXT)
    assert len(rows) == 7
    for module, first, more, lines in rows:
        module, names = importlib.import_module(module), [first, *re.findall(r", `(\w+)`", more)]
        scope = {}
        exec(lines + "\n" + "\n".join(inspect.getsource(getattr(module, name)) for name in names), scope)
        for name in names:
            missing = used_names(scope[name]) & vars(module).keys() - scope.keys()
            assert not missing, f"{name} also needs {missing}"


def used_names(function):
    """Global names in a function's code and in the functions inside it, or in a class's methods."""
    if inspect.isclass(function):
        methods = [getattr(m, "__func__", m) for m in vars(function).values()]
        return set().union(*(used_names(m) for m in methods if inspect.isfunction(m)))
    function = getattr(function, "__wrapped__", function)                            # behind torch.no_grad
    code, names = [function.__code__], set()
    while code:
        names |= {i.argval for i in dis.get_instructions(code[-1]) if i.opname == "LOAD_GLOBAL"}
        code = code[:-1] + [c for c in code[-1].co_consts if inspect.iscode(c)]
    return names


def test_the_tables_have_as_many_cells_in_every_row():
    for table in re.findall(r"(?:^\|.*\n)+", TEXT, re.M):
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(cells) == 1, table[:200]


# Every command of the README: those of its code blocks, and those that stand in a line of text. What makes each tiny:
TINY = {"mt_unlearn.py": "--max-epochs 1 --epoch-steps 1 --batch 2 --max-rows 2 --reg-docs 4 --reg-len 32",
        "npo_unlearn.py": "--epochs 1 --batch 80 --max-rows 2 --eval-rows 2", "grng.py": "--steps 2 --trials 1",
        "evaluate.py": ""}
CODE = [line.split("#")[0].strip() for block in re.findall(r"```bash\n(.*?)```", TEXT, re.S) for line in block.splitlines()]
CODE = [part.strip() for line in CODE for part in line.split("&&")]
INLINE = re.findall(r"`(python [\w./]+\.py[^`]*)`", re.sub(r"<!-- begin.*?<!-- end[^>]*>", "", TEXT, flags=re.S))
COMMANDS = [c for c in dict.fromkeys(CODE + INLINE) if c.startswith("python ") and not c.startswith("python -m ")]


def test_the_readme_has_commands():
    """Those by pip are what installed this environment, and the one by pytest is running."""
    assert len(COMMANDS) >= 12
    others = [c for c in CODE if c not in COMMANDS]
    assert [c for c in others if not c.startswith("python -m pip install")] == [
        "python -m pytest -q -n auto tests", "mkdir my_text", "cp MY_TEXT.txt my_text/forget.txt"]


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, mini_news, tmp_path, monkeypatch, capsys):
    """The README's command at a tiny setting, in an empty folder, with its placeholders filled in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_text").mkdir()
    (tmp_path / "my_text" / "forget.txt").write_text("\n---\n".join(mini_news.forget[:3]))
    command = command.replace("MY_MODEL", mini_news.models["target"]).replace("MODEL", mini_news.models["base"])
    script, *flags = command.split()[1:]
    if script.startswith("tests/"):                              # these make results/: an hour; here, what they would do
        flags = {"tests/make_results.py": ["--list"], "tests/benchmarks.py": ["--help"], "tests/make_tables.py": []}[script]
        monkeypatch.syspath_prepend(ROOT / "tests")
        script = script.removeprefix("tests/")
    elif script == "synthetic.py":
        flags = ["divergence", "--no-figures"]                   # the first study of `all`; the others take a minute
    elif script == "evaluate.py" and "report" in flags:          # on a copy: it writes README.md where it stands
        shutil.copy(ROOT / "README.md", tmp_path)
        shutil.copytree(ROOT / "results" / "tables", tmp_path / "results" / "tables")
    elif "muse_" in command or "tofu_" in command:
        flags.append("--dry-run")                                # full size: the memory plan
    else:
        flags += TINY[script].split()
    if "--seeds" in flags:
        flags[flags.index("--seeds") + 1] = "1"
    module = importlib.import_module(script.removesuffix(".py"))
    monkeypatch.setattr(sys, "argv", [script, *flags])
    if "--help" in flags:
        with pytest.raises(SystemExit, match="0"):
            module.main()
    elif script == "synthetic.py":
        module.main(module.parse_config(flags))
    elif script == "make_tables.py":
        return module.main(tmp_path)
    else:
        module.main()
    assert capsys.readouterr().out or "--readme" in flags
