"""Makes results/tables/*.md, the tables and verdicts of the README, from results/*.json:

    python tests/make_tables.py && python evaluate.py report --readme

A verdict compares what a paper prints of its tables and figures with our numbers of the same ones, at half a million
parameters; "fails" is a result.
"""
import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from evaluate import cell, load_runs, peak, run_rows, tables  # noqa: E402
from make_results import ONCE, TABLE_1  # noqa: E402
from npo_unlearn import METHODS  # noqa: E402

RESULTS = ROOT / "results"


def kept(name):
    """The kept numbers of one command."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(columns, rows):
    """A table: column titles, then rows of cells."""
    return "\n".join(["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|",
                      *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)])


# ----- runs -----

def runs(part):
    """The report's tables of all runs below results/PART."""
    return tables(load_runs(sorted((RESULTS / part).rglob("*.json"))))


def first():
    """The main job in three rows."""
    run, keys = kept("mt/mini_news/MT-NLUL-KL"), ("verbmem_f", "knowmem_r", "mmlu_val")
    rows = dict(target=[run["target"]], unlearned=next(run_rows(run))[1], retrain=[run["retrain"]])
    return markdown(("", *keys), [(name, *(cell([m[k] for m in metrics]) for k in keys)) for name, metrics in rows.items()])


def scripts():
    """What each script shows, how long it takes, and its headline numbers."""
    def seeds(run, key, percent=True):
        return cell([m.get(key) for m in next(run_rows(run))[1]], percent)
    mt, npo, ga = kept("mt/mini_news/MT-NLUL-KL"), kept("npo/mini_tofu/npo_rt"), kept("npo/mini_tofu/ga")
    rows = {r["optimizer"]: r for r in kept("grng")["tasks"]["digits"]["rows"] if "optimizer" in r}
    accuracy = {n: f"{rows[n]['test_mean']:.1f} ({rows[n]['test_std']:.1f}, {rows[n]['n']})" for n in ("RING", "AdamW")}
    verdicts = [c["verdict"] for c in kept("synthetic")["claims"]]
    seconds = kept("times")["seconds"]
    said = {
        "mt_unlearn": ("mean teacher + NLUL, [arXiv:2504.13388](https://arxiv.org/abs/2504.13388), on MUSE",
                       "a model forgets 44 articles it knew by heart and keeps 44 others",
                       f"verbatim memory {mt['target']['verbmem_f']:.1f} to {seeds(mt, 'verbmem_f')}, retrain "
                       f"{mt['retrain']['verbmem_f']:.1f}; retained knowledge {mt['target']['knowmem_r']:.1f} to "
                       f"{seeds(mt, 'knowmem_r')}"),
        "npo_unlearn": ("NPO and its family, [arXiv:2404.05868](https://arxiv.org/abs/2404.05868), on TOFU",
                        "a model forgets 4 of 40 fictitious authors: forget quality against utility",
                        f"NPO+RT: best forget quality {seeds(npo, 'peak_forget_quality', False)}, utility at the end "
                        f"{seeds(npo, 'model_utility', False)}; GA's {seeds(ga, 'model_utility', False)}"),
        "grng": ("RING, RENG, R-Kalman, [arXiv:2601.18420](https://arxiv.org/abs/2601.18420)",
                 "gradient-regularised natural gradients beside AdamW at equal tuning budgets",
                 f"digits: RING {accuracy['RING']}, AdamW {accuracy['AdamW']} per cent"),
        "synthetic": ("toy studies of the first two and of [Martens 2020](https://jmlr.org/papers/v21/17-678.html)",
                      "why gradient ascent collapses, what the mean teacher follows, where a proof slips",
                      f"with `all`: {verdicts.count('holds')} statements hold, {verdicts.count('fails')} fail")}
    rows = [(f"`{name}.py`", paper, sight, " / ".join(f"{t:.0f} s" for t in seconds[f"python {name}.py"]), result)
            for name, (paper, sight, result) in said.items()]
    rows.append(("`evaluate.py`", "the metrics of MUSE and TOFU",
                 "the only shared file: benchmarks in, numbers out, tables and figures", "", ""))
    return markdown(("script", "paper", "what you see", "time", "our mini result, mean (std, n)"), rows)


def sizes():
    """What full-size runs need by their memory plans."""
    rows = [(f"`{r['command']}`", f"{r['gb']:.0f} GB", str(r["steps"]), f"{r['hours']:.1g}") for r in kept("plans")["plans"]]
    return markdown(("command", "memory", "steps", "hours at 40 % of the peak"), rows)


# ----- studies -----

def verdicts(claims):
    """A row a claim; claims of one text and verdict share a row."""
    rows = {}
    for c in claims:
        rows.setdefault((c["claim"].split(", grad L at")[0], c["where"], c["verdict"]), []).append(
            c["measured"])
    return markdown(("claim", "printed in", "measured", "here"),
                    [(claim, where, m[0] + (f" (and {len(m) - 1} more)" if m[1:] else ""), f"**{verdict}**")
                     for (claim, where, verdict), m in rows.items()])


def features():
    """Final distances of the random-feature study beside the published ones."""
    rows = [r for r in kept("synthetic")["random_features"]["rows"] if r["published"] is not None]
    methods = list(dict.fromkeys(r["method"] for r in rows))
    at = {(r["alpha"], r["metric"], r["method"]): f"{r['mean']:.3g} ({r['std']:.2g}), median {r['median']:.3g}; "
                                                  f"*{r['published']}*" for r in rows}
    kinds = dict.fromkeys((r["alpha"], r["metric"]) for r in rows)
    return markdown(("", *methods), [(f"alpha {alpha:g}, {metric.replace('_', ' ')}", *(at[alpha, metric, m] for m in methods))
                                     for alpha, metric in kinds])


def optimizers():
    """Accuracy and speed of every optimizer on the tasks of grng.py."""
    out = []
    for task, data in kept("grng")["tasks"].items():
        rows = [(r["optimizer"], f"{r['test_mean']:.1f} ({r['test_std']:.1f}, {r['n']})",
                 "-" if r.get("steps_to_0.3") is None else f"{r['steps_to_0.3']:.0f}", f"{r['time_ratio']:.2f}")
                for r in data["rows"] if "optimizer" in r and "test_mean" in r]
        if rows:
            out += [f"**{task}**, `{data['command']}`\n", markdown(("", "test accuracy, mean (std, n)",
                    "steps to validation loss 0.3", "time of a step / AdamW's"), rows) + "\n"]
    return "\n".join(out)


def bench():
    """Speed and memory: what has a target and all of step and eval, min to max over the rounds behind the median."""
    data, mark = kept("bench"), {True: "yes", False: "**no**", None: ""}
    rows = [(section, r["case"], f"{r['median']:.2f} ({r['min']:.2f} to {r['max']:.2f})", r["target"] or "-", mark[r["met"]])
            for section, entry in data.items() for r in entry["rows"] if r["target"] or section in ("step", "eval")]
    host = data["step"]["machine"]
    note = f"{host['cpu']}, {host['cores']} cores, one thread, torch {host['torch']}, load average {host['load'][0]:.0f}: noisy."
    return note + "\n\n" + markdown(("section", "", "median", "target", "met"), rows)


# ----- what the papers say of their tables, and whether it holds here -----

def mean(result, key):
    """Mean over seeds of a metric; "peak" and "peak_utility" at the best forget quality along the run, see evaluate.peak."""
    rows = [{**s["metrics"], **s["evolution"][-1]["metrics"], **peak(s)} if "evolution" in s else s["metrics"]
            for s in result["seeds"]]
    return sum(row[key] for row in rows) / len(rows)


def mean_teacher_claims():
    """Section 5 of arXiv:2504.13388 against results/mt -> (claim, where, measured, holds)."""
    for bench in ("mini_news", "mini_books"):
        run = {name: kept(f"mt/{bench}/{name}") for name in TABLE_1}
        verb, know_f, know_r = ({n: mean(r, key) for n, r in run.items()} for key in ("verbmem_f", "knowmem_f", "knowmem_r"))
        stop = run["MT-NLUL-KL"]["retrain"]["verbmem_f"]
        target = run["MT-NLUL-KL"]["target"]
        yield (f"MT+NLUL+KL comes down to retrain's verbmem_f and keeps knowmem_r ({bench})", "Table 1",
               f"verbmem_f {target['verbmem_f']:.1f} -> {verb['MT-NLUL-KL']:.1f} (retrain {stop:.1f}), knowmem_r "
               f"{target['knowmem_r']:.1f} -> {know_r['MT-NLUL-KL']:.1f}",
               verb["MT-NLUL-KL"] <= stop and know_r["MT-NLUL-KL"] > 0.9 * target["knowmem_r"])
        met = [n for n in run if n.startswith("AdamW") and verb[n] <= stop]
        yield (f"it keeps more knowmem_r than each AdamW baseline that comes down there too ({bench})", "Table 1",
               f"MT {know_r['MT-NLUL-KL']:.1f}; " + ", ".join(f"{n} {know_r[n]:.1f}" for n in met) + "; not down there: "
               + ", ".join(f"{n} {verb[n]:.1f}" for n in run if n.startswith("AdamW") and n not in met),
               bool(met) and all(know_r["MT-NLUL-KL"] > know_r[n] for n in met))
        yield (f"AdamW with L and with NPO wipes the texts out, verbmem_f 0 ({bench})", "Table 1",
               f"L {verb['AdamW-L-KL']:.1f}, NPO {verb['AdamW-NPO-KL']:.1f} at the stop rule or after 10 epochs",
               max(verb["AdamW-L-KL"], verb["AdamW-NPO-KL"]) < 1)
        yield (f"QKL lets knowmem_f fall further than KL ({bench})", "Table 1",
               f"KL {know_f['MT-NLUL-KL']:.1f}, QKL {know_f['MT-NLUL-QKL']:.1f}",
               know_f["MT-NLUL-QKL"] < know_f["MT-NLUL-KL"] - 1)
        yield (f"PrivLeak comes half-way back to 0 ({bench})", "Table 1",
               f"{target['privleak']:.1f} -> {mean(run['MT-NLUL-KL'], 'privleak'):.1f}",
               abs(mean(run["MT-NLUL-KL"], "privleak")) < 0.7 * abs(target["privleak"]))
        again = sum(s["relearn"]["verbmem_f"] for s in run["MT-NLUL-KL"]["seeds"]) / 3
        yield (f"fine-tuning on unrelated questions brings nothing back ({bench})", "Table 3",
               f"verbmem_f {verb['MT-NLUL-KL']:.1f} -> {again:.1f}", again < verb["MT-NLUL-KL"] + 3)
    one = {name: mean(kept(f"mt/mini_news/{name}"), "verbmem_f") for name in ONCE}
    yield ("from memorised text the mean teacher does not move with L or NPO; with NLUL it does", "section 5.3, Figure 2",
           f"verbmem_f after 100 steps: L {one['MT-L-KL']:.1f}, NPO {one['MT-NPO-KL']:.1f}; NLUL stops at "
           f"{mean(kept('mt/mini_news/MT-NLUL-KL'), 'verbmem_f'):.1f}", min(one["MT-L-KL"], one["MT-NPO-KL"]) > 90)
    yield ("two epochs of AdamW let L and NPO escape", "Figure 1",
           ", ".join(f"{name.split('-')[1]} after {2 if name.endswith('e') else 6} epochs of it: {one[name]:.1f}"
                     for name in ONCE if "escape" in name),
           max(one["MT-L-escape"], one["MT-NPO-escape"]) < 50)
    four = {n: mean(kept(f"mt/mini_news/{n}"), "knowmem_r") for n in ("MT-sustain", "AdamW-sustain")}
    yield ("after four requests the mean teacher keeps more than AdamW+NPO", "Figure 4",
           f"knowmem_r {four['MT-sustain']:.1f} against {four['AdamW-sustain']:.1f}",
           four["MT-sustain"] > four["AdamW-sustain"])


def npo_claims():
    """Section 5 of arXiv:2404.05868 against results/npo -> (claim, where, measured, holds)."""
    run = {m: kept(f"npo/mini_tofu/{m}") for m in METHODS if m != "general"}
    weight = {w: kept(f"npo/weights/{w}") for w in ("0", "0.3", "2", "5")} | {"1": run["npo_rt"]}
    weight = {w: weight[w] for w in sorted(weight, key=float)}
    npo, ga = [m for m in run if m.startswith("npo")], [m for m in run if m.startswith("ga")]
    end, best, then = ({m: mean(r, key) for m, r in run.items()}
                       for key in ("model_utility", "peak_forget_quality", "peak_model_utility"))

    def said(numbers, names):
        return ", ".join(f"{m} {numbers[m]:.2f}" for m in names)
    start = run["npo"]["target"]["model_utility"]
    yield ("GA and its variants collapse (below 5 % of the utility), NPO and its variants do not (above half)", "Figure 6",
           f"utility {start:.2f} at the start; at the end: " + said(end, ga + npo),
           max(end[m] for m in ga) < 0.05 * start and min(end[m] for m in npo) > 0.5 * start)
    yield ("no method but NPO's reaches a forget quality of .05 at any epoch", "section 5.2, Figure 5", said(best, run),
           all((best[m] > .05) == (m in npo) for m in run))
    yield ("only NPO+RT and NPO+KL reach it with 90 % of the utility (90 %: ours)", "section 5.2, Figure 5",
           "utility where forget quality is best: " + said(then, [m for m in run if best[m] > .05]),
           {m for m in run if best[m] > .05 and then[m] > .9 * start} == {"npo_rt", "npo_kl"})
    kl = {m: mean(run[m], "kl_forget") for m in ("ga", "ga_rt", "npo", "npo_rt")}
    yield ("forget KL explodes under GA and stays moderate under NPO", "Figure 9",
           "nats a token at the end: " + said(kl, kl), min(kl["ga"], kl["ga_rt"]) > 2 * max(kl["npo"], kl["npo_rt"]))
    utility, quality = ({w: mean(r, key) for w, r in weight.items()} for key in ("model_utility", "forget_quality"))
    yield ("utility grows with the retain weight", "Figure 8", said(utility, utility),
           all(a <= b + .01 for a, b in zip(list(utility.values()), list(utility.values())[1:])))
    yield ("forget quality grows with the retain weight up to 2, then falls", "Figure 8", said(quality, quality),
           quality["0"] < quality["1"] < quality["2"] > quality["5"])


def unlearning_claims():
    return [dict(claim=claim, where=f"{paper}, {where}", measured=measured, verdict="holds" if holds else "fails")
            for paper, found in (("arXiv:2504.13388", mean_teacher_claims()), ("arXiv:2404.05868", npo_claims()))
            for claim, where, measured, holds in found]


TABLES = {"first": first, "scripts": scripts, "sizes": sizes, "muse": lambda: runs("mt"), "tofu": lambda: runs("npo"),
          "claims_unlearn": lambda: verdicts(unlearning_claims()),
          "features": features, "claims_synthetic": lambda: verdicts(kept("synthetic")["claims"]),
          "bench": bench, "optimizers": optimizers, "claims_grng": lambda: verdicts(kept("grng")["claims"])}


def main(out=RESULTS / "tables"):
    Path(out).mkdir(parents=True, exist_ok=True)
    for name, make in TABLES.items():
        (Path(out) / f"{name}.md").write_text(make().strip() + "\n", encoding="utf8")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
