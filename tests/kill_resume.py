"""No lost work: kills the training scripts (SIGKILL) at random moments, resumes them, and compares every bit.

Run:  python tests/kill_resume.py                everything: 20 kills a script, and all that can happen to files; 20 minutes of one core
      python tests/kill_resume.py --quick        what the test suite runs
Ends: one row a case; exit code 1 when one of them is not "equal bits" or "one line".

A case is a process forked from this one, which has imported the libraries once: that saves some seconds each. The scripts know
nothing of it: to hit a checkpoint while it is written, we watch the run folder for the file that is written beside it.
"""
import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ |= dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", MPLBACKEND="Agg")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib.figure  # noqa: E402, F401  (imported here for all the processes that are forked below)
import peft  # noqa: E402, F401
import rouge_score.rouge_scorer  # noqa: E402, F401
import scipy.stats  # noqa: E402, F401
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: E402, F401

import evaluate  # noqa: E402
import mt_unlearn  # noqa: E402
import npo_unlearn  # noqa: E402

torch.set_num_threads(1)
MAINS = {"mt": mt_unlearn.main, "npo": npo_unlearn.main, "prepare": evaluate.prepare_main}


# ----- processes -----

class Process:
    """MAINS[script](argv) in a forked process. cache: its LETHE_CACHE; fsize: the largest file it may write, in bytes.
    After `wait` there are .code (minus the signal for a killed one), .seconds, .err (lines of stderr) and,
    in keep, the last checkpoint that stood in the run folder."""

    def __init__(self, script, argv, cache, fsize=None, keep=None):
        self.out = Path(argv[argv.index("--out") + 1])
        self.files = [Path(tempfile.mkstemp(dir=ROOT / "streams")[1]) for _ in range(2)]
        self.keep, self.start = keep, time.time()
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.setsid()
            os.environ["LETHE_CACHE"] = str(cache)
            for k, file in enumerate(self.files, 1):
                os.dup2(os.open(file, os.O_WRONLY), k)
            if fsize:
                resource.setrlimit(resource.RLIMIT_FSIZE, (fsize, fsize))
            evaluate.run_main(lambda: MAINS[script](list(map(str, argv))))
            code = 0
        except SystemExit as e:
            code = e.code or 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush(), sys.stderr.flush()
            finally:
                os._exit(code)

    def wait(self, kill=lambda seconds: False):
        """Until it ends, or until kill(seconds so far) is true, asked all the time; then SIGKILL."""
        inode, self.code = None, None
        while self.code is None:
            time.sleep(5e-4 if hasattr(kill, "slow") else 2e-3)
            if hasattr(kill, "slow"):
                os.kill(self.pid, signal.SIGSTOP)                        # what it is writing stays as it is while we look
            if kill(time.time() - self.start):
                os.kill(self.pid, signal.SIGKILL)
                kill = lambda seconds: False  # noqa: E731
            elif hasattr(kill, "slow"):
                os.kill(self.pid, signal.SIGCONT)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
            if self.keep:
                try:
                    checkpoint = self.out / "seed0/checkpoint.safetensors"
                    if checkpoint.stat().st_mtime_ns != inode:
                        inode = checkpoint.stat().st_mtime_ns
                        Path(self.keep).unlink(missing_ok=True)
                        os.link(checkpoint, self.keep)
                except FileNotFoundError:
                    pass
        self.seconds = time.time() - self.start
        self.err = self.files[1].read_text().splitlines()
        return self


def writing(folder, name, after=0.0):
    """A moment for Process.wait: something is being written beside `name` in folder, `after` so many seconds. A small checkpoint is
    whole after some milliseconds, so the process is stopped again and again while we look."""
    def kill(seconds):
        try:
            return seconds > after and any(name in entry and entry != name for entry in os.listdir(folder))
        except FileNotFoundError:
            return False
    kill.slow = True
    return kill


def written(path, n=1):
    """A moment: the n-th version of a file is in its place."""
    seen = set()

    def kill(seconds):
        if path.exists():
            seen.add(path.stat().st_mtime_ns)
        return len(seen) >= n
    return kill


# ----- toys: benchmarks and models of seconds -----

def toys(root):
    """Benchmark folders muse and tofu below root, without models."""
    bench = evaluate.mini_bench("mini_news", texts=8)
    files = {f"muse/{name}.json": getattr(bench, name) for name in ("forget", "retain", "holdout", "pretraining")}
    files |= {f"muse/knowmem/{k}.json": v for k, v in bench.knowmem.items()} | {"muse/verbmem/forget.json": bench.verbmem}
    bench = evaluate.mini_tofu(authors=4, known=4)
    files |= {"tofu/forget.json": bench.forget_qa[:12], "tofu/retain.json": bench.retain_qa[:24], "tofu/idontknow.jsonl": bench.idk}
    files |= {f"tofu/{part}_perturbed.json": rows[:8] for part, rows in bench.tofu.items()}
    for name, rows in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(json.dumps(rows) if name.endswith(".json") else "\n".join(rows))


def argv_of(script, out, *more):
    """The command line of a run of about ten seconds."""
    if script == "prepare":
        return ["--bench", ROOT / "muse", "--base", "tiny", "--epochs", 20, "--out", out, *more]
    flags = ["--bench", ROOT / ("muse" if script == "mt" else "tofu"), "--device", "cpu", "--out", out]
    flags += (["--max-epochs", EPOCHS, "--epoch-steps", 3, "--stop", "none", "--batch", 8, "--reg-len", 48, "--max-rows", 4] if script == "mt" else
              ["--method", "dpo_kl", "--epochs", EPOCHS, "--batch", 4, "--lr", "1e-3", "--eval-rows", 4])
    return [*flags, *more]


# ----- what must be equal -----

def scrub(x):
    """JSON without times, and without the two flags in which a resumed run differs."""
    if isinstance(x, dict):
        return {k: scrub(v) for k, v in x.items() if k not in ("seconds", "out", "resume")}
    return [scrub(v) for v in x] if isinstance(x, list) else x


def contents(folder):
    """Relative name -> what a file says, times apart."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir():
            found[name] = "folder"
        elif name.endswith(".jsonl"):
            found[name] = [scrub(json.loads(line)) for line in path.read_text().splitlines()]
        else:
            found[name] = scrub(evaluate.try_json(path.read_text())) if name.endswith(".json") else path.read_bytes()
    if not (folder / "flags.json").exists():                             # models: what a killed process began is swept an hour later
        found = {k: v for k, v in found.items() if "/." not in f"/{k}"}
    return found


def tensors(path):
    """(header, bytes) of a safetensors file; the order of its metadata is left to chance."""
    data = path.read_bytes() if path.exists() else bytes(8)
    n = int.from_bytes(data[:8], "little")
    return json.loads(data[8:8 + n] or "0"), data[8 + n:]


def compare(out, whole, keep=None, whole_keep=None):
    """"equal bits", or what differs between two folders (and two last checkpoints: the optimizer's state)."""
    a, b = contents(out), contents(whole)
    wrong = sorted(a.keys() ^ b.keys()) + [name for name in sorted(a.keys() & b.keys()) if a[name] != b[name]]
    if keep and tensors(keep) != tensors(whole_keep):
        wrong.append("last checkpoint")
    return "equal bits" if not wrong else "differs: " + ", ".join(wrong)


def one_line(process, *words):
    """"one line" when the process ended with exit code 2 and one line on stderr that holds the words."""
    err = [line for line in process.err if not line.startswith("making the models")]
    if process.code == 2 and len(err) == 1 and all(w in err[0] for w in words):
        return "one line"
    return f"exit code {process.code}, {len(err)} lines: {err[-1][:150] if err else ''}"


# ----- the cases -----

class Table:
    """Rows as they come; a row is good when each of its verdicts is."""

    def __init__(self):
        self.failed = 0

    def row(self, script, case, *verdicts, note=""):
        good = all(v in ("equal bits", "one line") or v.startswith("skipped") for v in verdicts)
        self.failed += not good
        print(f"{'ok    ' if good else 'FAILED'} {script:8s}{case:44s}{'; '.join(dict.fromkeys(verdicts))}{'  ' + note if note else ''}", flush=True)


def fresh(name):
    """A new folder for one case: out, cache and the kept checkpoint are in it."""
    folder = ROOT / "cases" / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "cache").mkdir(parents=True)
    return folder


def uninterrupted(script, table, twice):
    """The run that all others of the script must equal -> (run folder, its last checkpoint, seconds)."""
    folder = fresh(f"{script}-whole")
    p = Process(script, argv_of(script, folder / "out"), folder / "cache", keep=folder / "kept").wait()
    if p.code:
        sys.exit(f"{script}: the uninterrupted run failed: " + "\n".join(p.err))
    if not twice:
        return folder / "out", folder / "kept", p.seconds
    again = Process(script, argv_of(script, folder / "again"), folder / "cache", keep=folder / "kept2").wait()
    table.row(script, "run twice", compare(folder / "again", folder / "out", *[folder / "kept2", folder / "kept"][:2 * (script != "prepare")]),
              note=f"{p.seconds:.1f} s, then with a warm cache {again.seconds:.1f} s")
    return folder / "out", folder / "kept", p.seconds


def kills(script, whole, n, rng, table):
    """n kills and a resumed run after each (every fourth is killed too): at random moments, but 2 of 5 aimed at a file being written."""
    out, kept, T = whole
    places, verdicts = Counter(), []
    for k in range(n):
        folder, prepare = fresh(f"{script}-kill"), script == "prepare"
        argv, keep = argv_of(script, folder / "out"), None if prepare else folder / "kept"
        aim = {0: "retrain" if prepare else "checkpoint.safetensors", 2: "target" if prepare else "model"}.get(k % 5)
        for resume in [[], ["--resume"] * (not prepare)][:1 + (k % 4 == 1)]:
            for attempt in range(5):                                     # it may end before its moment comes
                moment = rng.uniform(.02, .97) * T
                early = moment / 2 if aim == "checkpoint.safetensors" else 0
                moment = writing(folder / "out" / ("" if prepare else "seed0"), aim, early) if aim else lambda s, m=moment: s > m
                p = Process(script, argv + resume, folder / "cache", keep=keep).wait(moment)
                if p.code == -signal.SIGKILL or resume:
                    break
                folder = fresh(f"{script}-kill")
            left = [q.name for q in (folder / "out").rglob("*") if aim and aim in q.name and q.name != aim]
            places["after its end" if p.code != -signal.SIGKILL else f"writing {aim}" if left else "elsewhere"] += 1
        verdicts.append(resumed(script, folder, argv, whole))
        if verdicts[-1] != "equal bits":
            shutil.copytree(folder, ROOT / "failed" / f"{script}-{k}", dirs_exist_ok=True)
    table.row(script, f"{n} kills, resumed", *verdicts, note=", ".join(f"{n} {place}" for place, n in sorted(places.items())))


def resumed(script, folder, argv, whole):
    """Run again to the end (with --resume) -> the comparison with the uninterrupted run."""
    keep, flags = (None, []) if script == "prepare" else (folder / "kept", ["--resume"])
    p = Process(script, argv + flags, folder / "cache", keep=keep).wait()
    return compare(folder / "out", whole[0], keep, whole[1]) if p.code == 0 else f"exit code {p.code}: {p.err[-1:]}"


def refusals(script, whole, table, other):
    """A run is killed when its third checkpoint is there. Then a truncated checkpoint, foreign ones (another seed's; a pickle; the
    other script's), a changed flag and a missing --resume are each refused; with its own checkpoint it goes on."""
    folder, seed1 = fresh(f"{script}-refusals"), fresh(f"{script}-seed1")
    argv, checkpoint, said = argv_of(script, folder / "out"), folder / "out/seed0/checkpoint.safetensors", {}
    Process(script, argv, folder / "cache").wait(written(checkpoint, 3))
    foreign = seed1 / "out/seed1/checkpoint.safetensors"
    Process(script, argv_of(script, seed1 / "out", "--seed", 1), folder / "cache").wait(written(foreign))
    own = checkpoint.read_bytes()
    (folder / "half").write_bytes(own[:len(own) // 2])
    torch.save({"step": 3}, folder / "pickle")
    for name, file in dict(truncated=folder / "half", foreign=foreign, pickled=folder / "pickle", **{"other script's": other} if other else {}).items():
        shutil.copy(file, checkpoint)
        said[name + " checkpoint"] = one_line(Process(script, argv + ["--resume"], folder / "cache").wait(), "not a checkpoint of this run", "delete it")
    checkpoint.write_bytes(own)
    said["changed flag"] = one_line(Process(script, argv + ["--resume", "--seed", "7"], folder / "cache").wait(), "--seed was 0 and is 7")
    said["run folder in use"] = one_line(Process(script, argv, folder / "cache").wait(), "--resume")
    for name, verdict in said.items():
        table.row(script, name, verdict)
    table.row(script, "its own checkpoint and flags again", resumed(script, folder, argv, whole))


def file_limit(script, whole, table):
    """RLIMIT_FSIZE: a disk that is full before the log, the checkpoint, the model is whole."""
    folder = fresh(f"{script}-fsize")
    argv, said = argv_of(script, folder / "out"), []
    for size in (2_000, 60_000, 900_000):
        p = Process(script, argv + ["--resume"], folder / "cache", fsize=size).wait()
        said.append(one_line(p, "the disk is full", "--out"))
    junk = [q.name for q in folder.rglob("*") if q.name.startswith(".")]
    table.row(script, "no room for a file (RLIMIT_FSIZE)", *said, *([f"left behind: {junk}"] if junk else []), resumed(script, folder, argv, whole))


def full_disk(script, whole, table):
    """A tmpfs of 12 MB that fills up in the middle of a run; some space is freed, and the run goes on."""
    folder = fresh(f"{script}-full")
    disk = folder / "out"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        return table.row(script, "full disk (tmpfs)", f"skipped: cannot mount a tmpfs ({mounted.stderr.strip()})")
    try:
        argv, said = argv_of(script, disk / "out"), []
        for free in (0, 1_000_000, 3_000_000):
            filler = disk / "filler"
            filler.write_bytes(bytes(shutil.disk_usage(disk).free - free))
            p = Process(script, argv + ["--resume"], folder / "cache").wait()
            filler.unlink()
            said.append(one_line(p, "the disk is full", "--out"))
        keep = disk / "kept"                                             # a hard link does not leave its file system
        p = Process(script, argv + ["--resume"], folder / "cache", keep=keep).wait()
        end = compare(disk / "out", whole[0], keep, whole[1]) if p.code == 0 else f"exit code {p.code}: {p.err[-1:]}"
    finally:
        subprocess.run(["umount", disk], check=True)
    table.row(script, "full disk (tmpfs), space freed", *said, end)


def read_only_cache(script, whole, table):
    folder = fresh(f"{script}-readonly")
    cache, argv = folder / "cache", argv_of(script, folder / "out")
    cache.chmod(0o555)
    if os.getuid() == 0:                                                 # to root a mode means nothing, a mount does
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", cache], capture_output=True, text=True)
        if mounted.returncode:
            return table.row(script, "read-only cache", f"skipped: cannot mount a tmpfs ({mounted.stderr.strip()})")
    said = one_line(Process(script, argv, cache).wait(), "LETHE_CACHE")
    if os.getuid() == 0:
        subprocess.run(["umount", cache], check=True)
    cache.chmod(0o755)
    table.row(script, "read-only cache, then a writable one", said, resumed(script, folder, argv, whole))


def shared_cache(script, whole, table):
    """Two runs at once, one empty cache."""
    folder = fresh(f"{script}-shared")
    pair = [Process(script, argv_of(script, folder / name), folder / "cache") for name in ("a", "b")]
    table.row(script, "two runs at once with one cache", *[compare(folder / n, whole[0]) if p.wait().code == 0 else f"exit code {p.code}: {p.err[-1:]}"
                                                           for n, p in zip("ab", pair)])


def embedded(script, bench, rng, table):
    """The models of an embedded benchmark: two runs at once with an empty cache, both killed while the models are made, then one
    run with that cache; the models are those that an undisturbed process makes."""
    flags = ["--bench", bench, "--device", "cpu", "--max-rows", 2, *(["--max-epochs", 1] if script == "mt" else ["--epochs", 1])]
    folder = fresh(f"{script}-embedded")
    cache, models = folder / "cache", []
    for case, moments in (("calm", ()), ("killed", (rng.uniform(5, 12), rng.uniform(12, 25), rng.uniform(25, 40)))):
        for moment in moments:
            for p in [Process(script, [*flags, "--out", folder / f"{case}-{n}"], cache) for n in "ab"]:
                p.wait(lambda s, m=moment: s > m)
        for n in "ab"[:1 + bool(moments)]:
            p = Process(script, [*flags, "--out", folder / f"{case}-{n}", "--resume"], cache).wait()
            if p.code:
                return table.row(script, f"killed while {bench} is made", f"exit code {p.code}: {p.err[-1:]}")
        models.append(contents(cache))
        cache.rename(folder / case)                                      # the same place for both, as its name is in their config
        cache.mkdir()
    names = sorted(k for k in models[0].keys() | models[1].keys() if models[0].get(k) != models[1].get(k))
    table.row(script, f"2 x 3 kills while {bench} is made", "equal bits" if not names else f"differs: {names}",
              *[compare(folder / f"killed-{n}", folder / "calm-a") for n in "ab"])


def main():
    global ROOT, EPOCHS
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--quick", action="store_true", help="3 kills, wrong checkpoints and flags, files that find no room; of mt_unlearn.py alone")
    a.add_argument("--kills", type=int, default=20, help="kills a script")
    a.add_argument("--seed", type=int, default=0, help="of the moments")
    a.add_argument("--scripts", default="mt,npo,prepare", help="some of them, commas between")
    a.add_argument("--root", default="", help="work here and leave everything there (default: a temporary folder)")
    a = a.parse_args()
    EPOCHS = 4 if a.quick else 8
    ROOT = Path(a.root or tempfile.mkdtemp(prefix="kill_resume_")).resolve()
    (ROOT / "streams").mkdir(parents=True, exist_ok=True)
    rng, table = random.Random(a.seed), Table()
    toys(ROOT)
    for name in ("muse", "tofu")[:1 if a.quick else 2]:
        argv = ["--bench", ROOT / name, "--base", "tiny", "--epochs", 20, "--out", ROOT / name / "models"]
        if Process("prepare", argv, ROOT / "cache").wait().code:
            sys.exit("the toy models could not be made")
    scripts = ["mt"] if a.quick else a.scripts.split(",")
    whole = {script: uninterrupted(script, table, twice=not a.quick) for script in scripts}
    for script in scripts:
        kills(script, whole[script], 3 if a.quick else a.kills, rng, table)
        if script == "prepare":
            continue
        refusals(script, whole[script], table, whole.get("npo" if script == "mt" else "mt", [None] * 2)[1])
        file_limit(script, whole[script], table)
        if not a.quick:
            full_disk(script, whole[script], table)
            read_only_cache(script, whole[script], table)
            shared_cache(script, whole[script], table)
            embedded(script, "mini_news" if script == "mt" else "mini_tofu", rng, table)
    if not a.root:
        shutil.rmtree(ROOT, ignore_errors=True)
    print(f"{table.failed} failed" if table.failed else "nothing was lost")
    sys.exit(bool(table.failed))


if __name__ == "__main__":
    main()
