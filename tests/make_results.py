"""Makes the numbers and figures of the README: runs every command below, two at a time with one thread each, and keeps
their result.json in results/.  By hand:

    python tests/make_results.py            all that is missing (an hour or so on two cores)
    python tests/make_results.py mt         only the commands whose name starts so
    python tests/make_results.py --list     print the commands
    python tests/make_results.py --figures  only draw the figures again
    python tests/make_results.py --times    time each script's main job from an empty cache, on an idle machine
    python tests/make_results.py --plans    the memory plans of the full-size commands

A command whose JSON is there already is skipped; delete the file to repeat it.
"""
import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from evaluate import Bench, empty_model, parse_config, write_json  # noqa: E402
from npo_unlearn import METHODS  # noqa: E402

# Where nothing stops a run early, 10 epochs do: they show where it goes, and 20 take twice the time.
TABLE_1 = {
    "MT-NLUL-KL": "--relearn --survive",
    "MT-NLUL-QKL": "--divergence qkl",
    "MT-NLUL-QKL-star": "--divergence qkl --stop knowmem_f --max-epochs 10",
    "AdamW-NPO-KL": "--optimizer adamw --loss npo --max-epochs 10",
    "AdamW-IT-KL": "--optimizer adamw --loss it --max-epochs 10",
    "AdamW-L-KL": "--optimizer adamw --loss l --max-epochs 10",
    "AdamW-NLUL-KL": "--optimizer adamw --max-epochs 10"}
ONCE = {
    "MT-L-KL": "--loss l --max-epochs 10",
    "MT-NPO-KL": "--loss npo --max-epochs 10",
    "MT-IT-KL": "--loss it --max-epochs 10",
    "MT-L-escape": "--loss l --warm-escape 2 --max-epochs 10",
    "MT-NPO-escape": "--loss npo --warm-escape 2 --max-epochs 10",
    "MT-L-escape6": "--loss l --warm-escape 6 --max-epochs 14",
    "MT-NPO-escape6": "--loss npo --warm-escape 6 --max-epochs 14",
    "MT-tol": "--nlul-tol 0.02",
    "MT-lora16": "--lora 16 --max-epochs 10",
    "MT-bf16-momentum": "--bf16-momentum",
    "MT-retain": "--reg retain",
    "MT-all": "--trainable all",
    "MT-full-batch": "--full-batch --max-epochs 10",
    "MT-sustain": "--sustain --max-epochs 4 --divergence qkl",
    "AdamW-sustain": "--sustain --max-epochs 4 --optimizer adamw --loss npo"}


def commands():
    """Name -> the command's arguments; the name is the JSON's place below results/."""
    for bench in ("mini_news", "mini_books"):
        for name, flags in TABLE_1.items():
            yield f"mt/{bench}/{name}", f"mt_unlearn.py --bench {bench} --seeds 3 {flags}"
    for name, flags in ONCE.items():
        seeds = 3 if name in ("MT-tol", "MT-bf16-momentum") else 1       # these two are compared with the default
        yield f"mt/mini_news/{name}", f"mt_unlearn.py --seeds {seeds} {flags}"
    for method in (m for m in METHODS if m != "general"):
        yield f"npo/mini_tofu/{method}", f"npo_unlearn.py --method {method} --seeds 3"
    for weight in (0, 0.3, 2, 5):                                       # Figure 8; 1 is the method's own
        yield f"npo/weights/{weight:g}", f"npo_unlearn.py --retain-weight {weight:g} --seeds 3"


def make(name, command):
    """Run one command in runs/results/NAME, resuming a part that is there, and keep its numbers -> one line to print."""
    out, kept = ROOT / "runs" / "results" / name, ROOT / "results" / f"{name}.json"
    if kept.exists():
        return f"kept     {name}"
    resume = ["--resume"] if (out / "config.json").exists() else []
    done = subprocess.run([sys.executable, *command.split(), "--out", str(out), *resume], cwd=ROOT, text=True,
                          capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        return f"FAILED   {name}: {done.stderr.strip().splitlines()[-1:]}"
    result = json.loads((out / "result.json").read_text())
    for key in ("paths", "out", "resume"):                              # of this machine alone
        result["config"].pop(key, None)
    result["command"] = "python " + " ".join(command.split())
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(result, indent=1))
    return f"done     {name}  {result['seconds']:.0f} s"


def figures():
    """The README's pictures, from the logs of the runs made here: the story of section 5.3, and all rows of Table 1."""
    from evaluate import figures as draw, load_runs
    runs = ROOT / "runs" / "results" / "mt" / "mini_news"
    story = [runs / n for n in ("MT-NLUL-KL", "MT-tol", "MT-L-KL", "MT-NPO-KL", "MT-sustain", "AdamW-sustain")]
    if all((folder / "result.json").exists() for folder in story):
        draw(load_runs(story[:4]), ROOT / "results")                     # Figures 1, 2 (and a 3 that the next line redraws)
        draw([dict(r, logs=[]) for r in load_runs([runs / n for n in TABLE_1] + story[2:])], ROOT / "results")
    methods, weights = (sorted((ROOT / "results" / "npo" / part).glob("*.json")) for part in ("mini_tofu", "weights"))
    own = [ROOT / "results" / "npo" / "mini_tofu" / "npo_rt.json"]      # weight 1
    for files, name in ((methods, "tofu"), (own + weights if weights else (), "tofu_weights")):
        if files:
            (ROOT / "results" / name).mkdir(exist_ok=True)
            draw(load_runs(files), ROOT / "results" / name)


def times():
    """results/times.json: wall seconds of each script's main job on this machine, the models made anew, and again."""
    rows = {}
    for script in ("mt_unlearn.py", "npo_unlearn.py", "grng.py", "synthetic.py"):
        with tempfile.TemporaryDirectory() as folder:
            rows[f"python {script}"] = []
            for _ in range(2 if "unlearn" in script else 1):
                start = time.time()
                subprocess.run([sys.executable, ROOT / script], cwd=folder, check=True, stdout=subprocess.DEVNULL,
                               env={**os.environ, "LETHE_CACHE": f"{folder}/cache"})
                rows[f"python {script}"].append(time.time() - start)
    write_json(ROOT / "results" / "times.json", dict(seconds=rows, cores=os.cpu_count(), load=os.getloadavg()))


# Full-size commands -> optimizer steps of the longest run, tokens a step trains on, tokens a frozen model reads besides.
# A question of TOFU with its answer has about 100 tokens; 400 of them in steps of 32, ten times.
MT_STEP, NPO_STEP = (2000, 40 * 1024 + 40 * 512, 40 * 512), (130, 2 * 32 * 100, 0)
FULL_SIZE = {"mt_unlearn.py --bench muse_books": MT_STEP,
             "mt_unlearn.py --bench muse_books --bf16-momentum --teacher-host": MT_STEP,
             "mt_unlearn.py --bench muse_books --lora 16": MT_STEP,
             "npo_unlearn.py --bench tofu_forget10 --lora 16 --checkpointing --micro-batch 4": NPO_STEP,
             "npo_unlearn.py --bench tofu_forget10 --adam8bit --checkpointing --micro-batch 4": NPO_STEP}


def plans(N=6.74e9):
    """results/plans.json: memory by each command's own plan on CUDA, and an ESTIMATE of the hours of its steps, without
    the evaluations: 6 N a trained token (adapters: 4 N), 2 N a read one, at 40 % of an H100's peak."""
    rows = []
    for command, (steps, trained, read) in FULL_SIZE.items():
        script, *flags = command.split()
        module = __import__(script.removesuffix(".py"))
        cfg = parse_config(module.Config, "", [*flags, "--dry-run"])
        module.fill_preset(cfg, Bench(cfg.bench), empty_model(""))
        cfg.device = "cuda"
        low = cfg.lora or getattr(cfg, "adam8bit", False)
        seconds = steps * N * ((4 if cfg.lora else 6) * trained + 2 * read) / (.4 * (990e12 if low else 495e12))
        rows.append(dict(command=f"python {command}", gb=sum(module.memory_plan(cfg, empty_model("")).values()), steps=steps,
                         hours=seconds / 3600))
    write_json(ROOT / "results" / "plans.json", dict(plans=rows))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", help="only the commands whose name starts so")
    parts = dict(figures=figures, times=times, plans=plans)
    for flag in ("list", *parts):
        p.add_argument(f"--{flag}", action="store_true")
    a = p.parse_args()
    for flag, make_it in parts.items():
        if getattr(a, flag):
            return make_it()
    jobs = [(n, c) for n, c in commands() if not a.names or any(n.startswith(w) for w in a.names)]
    if a.list:
        print("\n".join(f"{name:35s}python {' '.join(command.split())}" for name, command in jobs))
        return
    for bench in {{"weights": "mini_tofu"}.get(p := n.split("/")[1], p) for n, _ in jobs}:
        subprocess.run([sys.executable, "evaluate.py", "--bench", bench], cwd=ROOT, check=True)  # the models, once
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for line in pool.map(lambda job: make(*job), jobs):
            print(line, flush=True)
    figures()


if __name__ == "__main__":
    main()
