"""Benchmarks in, numbers out: what every script of this repository measures forgetting with.

Run:  python evaluate.py --bench mini_news --model runs/x/seed0/model (prints the table, --out FILE writes the JSON)
      python evaluate.py prepare --bench FOLDER --base MODEL         (fine-tunes target and retrain for any benchmark)
      python evaluate.py report runs/a runs/b                        (tables beside the published numbers, and figures)

Three rooms, in this order: benchmarks (texts and models in), metrics (numbers out), report (tables and figures).
Nothing here knows an unlearning step. MUSE: Shi et al., arXiv:2407.06460; the tables we compare with: arXiv:2504.13388.

A benchmark is a name (muse_*, tofu_forgetNN, mini_news, mini_books, mini_tofu) or any folder that holds `forget.txt`:
    forget.txt | forget.jsonl | train/forget.json | raw/forget.json     the texts to forget; likewise retain and holdout
    pretraining.txt                                                     general text that must survive
    verbmem/forget.json                        [{"prompt", "gt"}]    without it, queries are cut from the forget texts
    knowmem/{forget,retain}_qa{,_icl}.json     [{"question", "answer"}]
    privleak/{forget,holdout,retain}.json      [text]                   without it, cut from forget and holdout
    mmlu/{dev,validation}.jsonl                {"question", "subject", "choices", "answer": index}
    sust/forget_{1..4}.json, sft.jsonl, models/{base,target,retrain}
or, like TOFU, questions and answers, which are then measured by TOFU's metrics instead of MUSE's:
    forget.jsonl, retain.jsonl                 {"question", "answer"}   both must be of this kind
    {forget,retain,real_authors,world_facts}_perturbed.jsonl   also "paraphrased_answer", "perturbed_answer": [text]
    idontknow.jsonl                            a refusal on each line
Every file may be .json (a list), .jsonl, .txt or a parquet copy of the hub's. A metric whose data is missing is "not
computed", with the reason. A .txt becomes documents at lines that hold only `---`; a file without such lines is cut at
blank lines, and its paragraphs are joined again until a document has 2000 characters. A row {"question", "answer"}
where a text is expected becomes the text "Question: ...\\nAnswer: ...". Duplicated rows are kept: they weigh double.

Shapes: B sequences, T tokens, V vocabulary, P tokens of a shared prefix, N tokens or texts.
"""
import argparse
import copy
import errno
import hashlib
import inspect
import json
import operator
import os
import platform
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch


# ===== room 0: one-line errors and files that are never half written =====

class BadInput(Exception):
    """The user's input is wrong. str(e) is ONE line: the thing and the remedy."""


OPENED = []      # the run folders that this process has made


def run_main(main):
    """Call main(). BadInput and a full disk become one line on stderr and exit code 2; others keep their trace.
    Whatever ends it, a run folder in which nothing was computed goes."""
    os.environ.setdefault("MPLCONFIGDIR", str(cache_path() / "matplotlib"))  # for its list of fonts
    try:
        return main()
    except BadInput as e:
        line = str(e)
    except KeyboardInterrupt:
        print("stopped; a training run goes on with the same flags and --resume", file=sys.stderr)
        sys.exit(130)
    except Exception as e:       # torch.save and safetensors wrap a full disk in errors of their own: hence the words
        words = ("o space left", "quota exceeded", "File too large", "PytorchStreamWriter")
        if getattr(e, "errno", None) not in (errno.ENOSPC, errno.EDQUOT) and not any(w in str(e) for w in words):
            raise
        line = f"the disk is full ({e}): free some space, or write elsewhere with --out"
    finally:
        for folder in OPENED:
            files = [p for p in folder.rglob("*") if p.is_file() and p.name not in ("flags.json", "config.json")]
            if not any(p.stat().st_size for p in files):
                shutil.rmtree(folder, ignore_errors=True)
        OPENED.clear()
    print("error: " + redact(" ".join(line.split())), file=sys.stderr)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """argparse whose complaint is one line: forty flags of usage in front of it hide the word that matters."""

    def error(self, message):
        flag = re.search(r"unrecognized arguments:.*?(--[\w-]+)", message)
        hint = nearest(flag[1], re.findall(r"--[\w-]+", self.format_usage())) if flag else ""
        raise BadInput(f"{message}{hint}; --help lists the flags")


def nearest(word, known) -> str:
    """" (did you mean X?)" where word is nearly, or the beginning of, an X in `known`, else ""."""
    from difflib import get_close_matches
    close = [x for x in known if x.startswith(word)] or get_close_matches(word, known)
    return f" (did you mean {close[0]}?)" if close else ""


def check_numbers(cfg, above_0="", from_0="", from_1="", from_2=""):
    """Refuse fields of a config that are out of range, by the name of their flag. Four lists of names with spaces
    between; None is a number left unset. No field may be NaN or infinite, whether listed or not."""
    rules = [(f.name, "must be finite", np.isfinite) for f in fields(cfg) if isinstance(getattr(cfg, f.name), float)]
    rules += [(name, "must be positive", lambda v: v > 0) for name in above_0.split()]
    rules += [(name, f"must be {low} or more", lambda v, low=low: v >= low)
              for low, names in enumerate((from_0, from_1, from_2)) for name in names.split()]
    for name, rule, holds in rules:
        value = getattr(cfg, name)
        if value is not None and not holds(value):
            raise BadInput(f"--{name.replace('_', '-')} {value} {rule}")


def redact(text) -> str:
    """text without the hub's access tokens: they come in by a path, a link or the environment, and logs are shared."""
    secrets = [v for k in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if len(v := os.environ.get(k, "").strip()) > 7]
    return re.sub("|".join([r"hf_\w{16,}", *map(re.escape, secrets)]), "hf_***", text)


def cache_path() -> Path:
    """$LETHE_CACHE or ~/.cache/lethe."""
    return Path(os.environ.get("LETHE_CACHE") or Path.home() / ".cache" / "lethe").expanduser()


def cache_dir() -> Path:
    """cache_path; one that cannot be written raises BadInput."""
    path = cache_path()
    must_write(path / "probe", "point LETHE_CACHE at a writable folder for the cache")
    return path


def must_write(path, remedy):
    """BadInput now, and not after an hour, where path could not be written. os.access would say yes to root on a
    read-only mount: we try, in the folder where path's missing folders would be made, and leave nothing there."""
    try:
        if Path(path).is_dir():
            raise OSError(errno.EISDIR, "it is a folder")
        tempfile.TemporaryFile(dir=next(p for p in Path(path).absolute().parents if p.exists())).close()
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BadInput(f"cannot write {path} ({e.strerror}): {remedy}") from e


def beside(path) -> Path:
    """A name next to path for writing before the rename: same file system, unique to this process and thread."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.unfinished")


def sweep(folder, seconds=3600):
    """Remove what killed processes were writing `beside` the files of folder: of a model that is gigabytes. Somebody
    else may be writing there now, hence only what nobody has touched for so many seconds."""
    for left in Path(folder).glob(".*.unfinished*"):
        try:
            if time.time() - left.stat().st_mtime >= seconds:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        except FileNotFoundError:                            # another process sweeps too
            pass


def rename_folder(new: Path, folder: Path):
    """Put folder `new` in the place of `folder`. A rename cannot replace a full folder, so the old one steps aside;
    when two processes do this at once the last rename wins, and nobody ever sees a half-written folder."""
    while True:
        try:
            return os.rename(new, folder)
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        old = Path(f"{beside(folder)}.old")
        try:
            os.rename(folder, old)
        except FileNotFoundError:                            # somebody else moved it between our two renames
            continue
        shutil.rmtree(old, ignore_errors=True)


def write_json(path, obj):
    """Write obj as JSON: beside, fsync, rename, so that a kill leaves the old file or the new one. NaN and inf become
    null, because the JSON of the standard has no word for them and browsers refuse Python's."""
    text = json.dumps(obj, ensure_ascii=False, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))
    plain, tmp = json.loads(redact(text), parse_constant=lambda _: None), beside(path)
    try:
        with open(tmp, "w", encoding="utf8") as f:
            json.dump(plain, f, indent=1, ensure_ascii=False, allow_nan=False)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)                          # gone already when all went well


def try_json(text):
    """What a JSON text says; None for one that a kill or a full disk cut short."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def sha256(obj) -> str:
    """Of the bytes of a file (Path), of a model folder's weights, config and tokenizer (Path), else of obj as JSON."""
    h = hashlib.sha256()
    if not isinstance(obj, Path):
        h.update(json.dumps(obj, sort_keys=True, ensure_ascii=False).encode("utf8", "surrogatepass"))
        return h.hexdigest()
    kinds = (".safetensors", ".json", ".model", ".txt", ".jinja")
    for file in [obj] if obj.is_file() else sorted(p for p in obj.iterdir() if p.suffix in kinds):
        h.update(file.name.encode() if file != obj else b"")
        with open(file, "rb") as f:
            while block := f.read(1 << 20):
                h.update(block)
    return h.hexdigest()


# ===== room 1: benchmarks =====

@dataclass
class Bench:
    """One unlearning problem. Any list may be empty; `missing` says for each metric that cannot be computed why not."""
    name: str
    forget: list = field(default_factory=list)       # texts of the unlearning request, in training form
    retain: list = field(default_factory=list)       # texts that share the domain and must stay
    holdout: list = field(default_factory=list)      # texts of the domain that no model saw: PrivLeak's other side
    pretraining: list = field(default_factory=list)  # general text, for the divergence of the mean teacher
    verbmem: list = field(default_factory=list)      # {"prompt", "gt"}; cut_queries makes them when there are none
    knowmem: dict = field(default_factory=dict)      # {forget,retain}_qa{,_icl} -> [{"question", "answer"}]
    privleak: dict = field(default_factory=dict)     # forget, holdout, retain -> [text]
    mmlu: dict = field(default_factory=dict)         # dev, validation -> [{"question", "subject", "choices", "answer"}]
    requests: list = field(default_factory=list)     # sequential requests, lists of texts
    sft: list = field(default_factory=list)          # unrelated {"question", "answer"} pairs for relearning
    models: dict = field(default_factory=dict)       # base, target, retrain, tokenizer -> folder or hub id
    train: dict = field(default_factory=dict)        # what prepare fine-tunes on: base, target, retrain -> [document]
    auc_retrain: float | None = None                 # published constant, used only when no retrain model is measured
    verbmem_new_tokens: int = 128
    knowmem_new_tokens: int = 32
    context: int = 1024                              # tokens a training chunk of the forget texts has at most
    truncate: bool = False                           # True: a text is cut at `context` (News), False: chunks (Books)
    mmlu_final: str = "Question:"                    # how the generative prompt opens its last question, see mmlu_text
    missing: dict = field(default_factory=dict)      # metric -> reason
    # TOFU and its like: rows of question and answer
    forget_qa: list = field(default_factory=list)    # {"question", "answer"} to train on: the unlearning request
    retain_qa: list = field(default_factory=list)
    tofu: dict = field(default_factory=dict)         # SETS -> rows to measure, see tofu_rows
    idk: list = field(default_factory=list)          # ways to say "I don't know"
    template: str = "auto"                           # see pick_template
    answer_new_tokens: int = 200


# The hub's names, what the papers print for Llama-2-7B, and the AUC of the published retrain models. "Quesion:" is the
# typing error of the prompt behind the published generative MMLU scores (arXiv:2504.13388): numbers have a prompt.
_LLAMA = "meta-llama/Llama-2-7b-hf"
MUSE = {
    f"muse_{name}": dict(
        hub=f"muse-bench/MUSE-{name.title()}", auc_retrain=auc, truncate=name == "news", mmlu_final="Quesion:",
        models=dict(base=_LLAMA, target=f"muse-bench/MUSE-{name}_target", retrain=f"muse-bench/MUSE-{name}_retrain",
                    tokenizer=_LLAMA))
    for name, auc in (("news", 0.4772), ("books", 0.5393))}
EMBEDDED = ("mini_news", "mini_books", "mini_tofu")
LETTERS = "ABCDEFGHIJ"
DOCUMENT_CHARS = 2000     # a .txt's paragraphs are joined to documents of at least that much, about 500 tokens


def qa_text(question, answer=None):
    """The format of knowmem: a worked example; without an answer the query, which ends in a space, as released."""
    return f"Question: {question}\nAnswer: " + (f"{answer}\n\n" if answer is not None else "")


def mmlu_text(row, answered, style="generative", final="Question:"):
    """One four-choice question as text. style "generative": the released mean-teacher prompt, opened by `final`;
    "logprob": the common one (Hendrycks et al.). answered: a worked example with its letter, else the query."""
    choices = "".join(f"{letter}. {c}\n" for letter, c in zip(LETTERS, row["choices"]))
    end = f" {LETTERS[row['answer']]}\n\n" if answered else ""
    if style == "logprob":
        return f"{row['question']}\n{choices}Answer:{end}"
    return f"{final} {row['question']}\n\nChoices:\n{choices}\nCorrect answer:{end}"


def read_text(path) -> str:
    """A UTF-8 file as text; a byte order mark is dropped and Windows line ends become \\n."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as e:
        raise BadInput(f"{path}: not UTF-8 (byte {e.start}); save it as UTF-8, say by iconv -f latin1 -t utf-8") from e
    except OSError as e:
        raise BadInput(f"{path}: cannot be read ({e.strerror})") from e


def documents(text) -> list[str]:
    """The documents of a .txt: parts between lines of `---`, else paragraphs joined up to DOCUMENT_CHARS characters."""
    parts = re.split(r"(?m)^[ \t]*---[ \t]*$", text)
    if len(parts) == 1:
        parts = [""]
        for paragraph in re.split(r"\n\s*\n", text):
            if len(parts[-1]) >= DOCUMENT_CHARS:
                parts.append("")
            parts[-1] += "\n\n" + paragraph
    return [p.strip() for p in parts if p.strip()]


def read_file(path) -> list:
    """Rows of a .json (a list) or .jsonl, documents of a .txt; any other file is one document."""
    text, line, rows = read_text(path), 0, []
    if path.suffix not in (".json", ".jsonl"):
        return documents(text) if path.suffix == ".txt" else [text]
    lines = path.suffix == ".jsonl" or text.startswith('{"question"')          # TOFU's .json are JSON lines too
    try:
        if not lines:
            rows = json.loads(text)
        for line, row in enumerate(text.split("\n") if lines else (), 1):
            if row.strip():
                rows.append(json.loads(row))
        if not isinstance(rows, list):
            raise BadInput(f"{path}: expected a list of rows, found {type(rows).__name__}")
        json.dumps(rows, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:                          # JSON can spell it, no tokenizer takes it
        raise BadInput(f"{path}: a string holds half a character, {e.object[e.start]!r}; repair the file") from e
    except (ValueError, RecursionError) as e:                # or a number of 5,000 digits, a list in 1,000 lists
        where = line or getattr(e, "lineno", 1)
        raise BadInput(f"{path}: not JSON at line {where} ({getattr(e, 'msg', None) or str(e)[:80]})") from e
    return rows


def read_rows(folder, split):
    """Rows of folder/split in whichever form lies there -> (rows, file), or (None, None) when there is no such file."""
    for path in (Path(folder) / (split + suffix) for suffix in (".txt", ".jsonl", ".json")):
        if path.is_file():
            return read_file(path), path
    shards = sorted(Path(folder).glob(f"{split}-*-of-*.parquet"))      # a downloaded copy of the hub's repository
    if shards:
        from pyarrow.parquet import read_table
        try:
            return [row for shard in shards for row in read_table(shard).to_pylist()], shards[0]
        except (OSError, ValueError) as e:                   # pyarrow's own errors are ValueErrors
            raise BadInput(f"{shards[0]}: not a parquet file that can be read ({str(e)[:80]}); fetch it again") from e
    return None, None


def as_texts(rows, where) -> list[str]:
    """Rows that are strings, {"text": ...} or {"question", "answer"} -> strings. Names file and row of a bad one."""
    texts = []
    for i, row in enumerate(rows, 1):
        if isinstance(row, dict) and isinstance(row.get("question"), str) and isinstance(row.get("answer"), str):
            row = qa_text(row["question"], row["answer"]).rstrip("\n")
        text = row.get("text") if isinstance(row, dict) else row
        if not isinstance(text, str):
            raise BadInput(f'{where}: row {i} is neither a string nor {{"text": string}}')
        if not text.strip():
            raise BadInput(f"{where}: row {i} is empty; remove it")
        texts.append(text)
    return texts


def as_records(rows, where, *keys) -> list[dict]:
    """Rows with the given keys, all non-empty strings -> the same rows with those keys alone."""
    for i, row in enumerate(rows, 1):
        for key in keys:
            if not isinstance(row, dict) or key not in row:
                raise BadInput(f'{where}: row {i} has no "{key}"')
            if not isinstance(row[key], str) or not row[key].strip():
                raise BadInput(f'{where}: row {i}: "{key}" {"is empty" if row[key] == "" else "is not a text"}')
    return [{key: row[key] for key in keys} for row in rows]


def as_choices(rows, where) -> list[dict]:
    """Rows of multiple-choice questions, checked; the subject is "all" when absent."""
    for i, row in enumerate(rows, 1):
        choices = row.get("choices") if isinstance(row, dict) else None
        if not isinstance(choices, list) or not 2 <= len(choices) <= 10 or not all(isinstance(c, str) for c in choices):
            raise BadInput(f'{where}: row {i} needs "choices", a list of 2 to 10 texts')
        index = row.get("answer")
        if not isinstance(row.get("question"), str) or type(index) is not int or index not in range(len(choices)):
            raise BadInput(f'{where}: row {i} needs a "question" and an "answer" that is the index of a choice')
    return [dict(question=r["question"], subject=str(r.get("subject", "all")), choices=r["choices"], answer=r["answer"])
            for r in rows]


def read_texts(path) -> list[str]:
    """The documents of a .txt, .json or .jsonl file, or of every .txt of a folder."""
    path = Path(path)
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    texts = [t for f in files for t in as_texts(read_file(f), f)]
    if not texts:
        raise BadInput(f"{path}: no text in it")
    return texts


def read_pairs(path) -> list[dict]:
    """Question-answer pairs of a .json or .jsonl file."""
    return as_records(read_file(Path(path)), path, "question", "answer")


def load_bench(name, data_dir="", forget_split="train", max_authors=None) -> Bench:
    """A benchmark by name or folder. data_dir: a local copy of muse_* or TOFU; forget_split: "train" (News: 3,554 rows,
    the paper's) or "raw" (889, MUSE's own definition), used where a source has both; max_authors: see tofu_bench."""
    if forget_split not in ("train", "raw"):
        raise BadInput(f'--forget-split {forget_split}: choose "train" or "raw"')
    if data_dir and not Path(data_dir).is_dir():
        raise BadInput(f"--data-dir {data_dir}: no such folder")
    if max_authors is not None and name not in TOFU:
        raise BadInput(f"--max-authors goes with tofu_forgetNN, not with {name}")
    if name in EMBEDDED:
        return mini_tofu() if name == "mini_tofu" else mini_bench(name)
    if name in TOFU:
        return tofu_bench(name, data_dir, max_authors)
    if name in MUSE:
        known = {k: v for k, v in MUSE[name].items() if k != "hub"}
        source = folder_source(Path(data_dir)) if data_dir else hub_source(name)
        return build_bench(name, source, data_dir or MUSE[name]["hub"], forget_split, **copy.deepcopy(known))
    if data_dir:
        raise BadInput(f"--data-dir goes with {', '.join(MUSE)}, tofu_forgetNN; your own folder is itself the --bench")
    if Path(name).is_dir():
        bench = qa_folder(Path(name)) or build_bench(str(name), folder_source(Path(name)), str(name), forget_split)
        bench.models.update({k: str(Path(name) / "models" / k) for k in ("base", "target", "retrain")
                             if (Path(name) / "models" / k / "config.json").is_file()})
        return bench
    if Path(name).is_file():
        raise BadInput(f"{name} is a file: give the folder that holds it, with the texts in its forget.txt")
    known = (*MUSE, *TOFU, *EMBEDDED)
    raise BadInput(f"unknown benchmark {name!r}{nearest(name, known)}: choose {', '.join(known)}, or a folder (seen "
                   f"from {Path.cwd()}) with at least forget.txt")


def folder_source(folder: Path):
    """A function (config, *splits) -> (rows of all of those splits, file) over a local folder; config "" is its top."""
    def rows(config, *splits):
        found = [got for split in splits if (got := read_rows(folder / config, split))[0] is not None]
        return ([row for r, _ in found for row in r], found[0][1]) if found else (None, None)
    return rows


def hub_source(name):
    """The same function over the hub's dataset."""
    def rows(config, *splits):
        if not config:
            return None, None
        repo, part = ("cais/mmlu", "all") if config == "mmlu" else (MUSE[name]["hub"], config)
        data = hub_dataset(repo, part)
        found = [row for s in splits if s in data for row in data[s]]
        return (found, f"{repo}/{part}/{splits[0]}") if found else (None, None)
    return rows


@lru_cache
def hub_dataset(repo, part):
    """{split: rows} of a part of a hub dataset, or {} where it has no such part. Whether the hub answers is asked
    first, before heavy imports; where it does not, a copy that is in the library's cache will do."""
    cache = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"
    remedy = "point --data-dir at a local copy"
    if not hub_answers() and not any(cache.glob(f"datasets--{repo.replace('/', '--')}")):
        raise BadInput(f"the dataset {repo} is needed and the hub does not answer: {remedy}")
    import datasets
    try:
        return datasets.load_dataset(repo, part)
    except Exception as e:                                   # the library raises a dozen kinds of them
        if "BuilderConfig" in str(e):                        # Books has no sust
            return {}
        why = f"{type(e).__name__}: {str(e)[:120]}"
        raise BadInput(f"the dataset {repo} ({part}) cannot be loaded ({why}): {remedy}") from e


@lru_cache
def hub_answers(seconds=5) -> bool:
    """Whether the model hub answers at all; False within `seconds` whatever is wrong with the network."""
    import urllib.error
    import urllib.request

    def ask():
        try:
            urllib.request.urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=seconds)
            answered.append(True)
        except urllib.error.HTTPError:
            answered.append(True)                            # an angry answer is an answer
        except OSError:
            pass
    answered = []
    thread = threading.Thread(target=ask, daemon=True)       # a resolver that drops packets ignores every timeout
    if os.environ.get("HF_HUB_OFFLINE", "0") in ("0", ""):
        thread.start()
        thread.join(seconds)
    if not answered:                                         # now the libraries look into their cache and do not retry
        os.environ["HF_HUB_OFFLINE"] = "1"
        if "huggingface_hub" in sys.modules:                 # which has read the variable already
            sys.modules["huggingface_hub"].constants.HF_HUB_OFFLINE = True
    return bool(answered)


def build_bench(name, source, place, forget_split, **known) -> Bench:
    """Ask `source` for every part of a benchmark and check it. Only the forget texts are required."""
    def get(check, configs, *splits):
        for rows, where in (source(config, *splits) for config in configs):
            if rows:
                return check(rows, where)
        return []

    def pairs(rows, where):
        return as_records(rows, where, "question", "answer")
    bench, top = Bench(name, **known), ("", forget_split, {"train": "raw", "raw": "train"}[forget_split])
    bench.forget = get(as_texts, top, "forget")
    if not bench.forget:
        if list(Path(place).glob("*.safetensors")):
            raise BadInput(f"{Path(place).absolute()} is a model, not a benchmark: give it by --target (evaluate.py: "
                           f"--model)")
        raise BadInput(f"{place}: forget.txt (.jsonl, .json, raw/forget.json) is missing or empty: nothing to forget")
    bench.retain = get(as_texts, top, "retain", "retain1", "retain2")
    bench.holdout = get(as_texts, top, "holdout")
    bench.pretraining = get(as_texts, ("",), "pretraining")
    bench.sft = get(pairs, ("",), "sft")
    bench.verbmem = get(lambda rows, where: as_records(rows, where, "prompt", "gt"), ("verbmem",), "forget")
    for config, check, splits in (("knowmem", pairs, ("forget_qa", "forget_qa_icl", "retain_qa", "retain_qa_icl")),
                                  ("privleak", as_texts, ("forget", "holdout", "retain")),
                                  ("mmlu", as_choices, ("dev", "validation"))):
        getattr(bench, config).update({split: rows for split in splits if (rows := get(check, (config,), split))})
    bench.requests = [texts for i in range(1, 5) if (texts := get(as_texts, ("sust",), f"forget_{i}"))]
    if not bench.requests:                                   # four near-equal parts, in order; fewer of fewer texts
        n, k = len(bench.forget), min(4, len(bench.forget))
        bench.requests = [bench.forget[i * n // k:(i + 1) * n // k] for i in range(k)]
    # As MUSE's models: the target saw both, retrain never saw the forget texts. Nothing trains a base: it is given.
    bench.train = {"target": bench.retain + bench.forget, "retrain": list(bench.retain)}
    for metrics, there, file in ((("knowmem_f",), bench.knowmem.get("forget_qa"), "knowmem/forget_qa.json"),
                                 (("knowmem_r",), bench.knowmem.get("retain_qa"), "knowmem/retain_qa.json"),
                                 (("auc", "privleak"), bench.privleak.get("holdout") or bench.holdout, "holdout texts"),
                                 (("mmlu_val", "mmlu_val_logprob"), bench.mmlu.get("validation"),
                                  "mmlu/validation.jsonl")):
        bench.missing.update({metric: f"{place} has no {file}" for metric in metrics if not there})
    return bench


# ----- TOFU -----
TOFU = {f"tofu_forget{n:02d}": n for n in (1, 5, 10, 20, 30, 50, 90)}      # name -> per cent of the authors to forget
TOFU_LLAMA = "open-unlearning/tofu_Llama-2-7b-chat-hf_"
# [ours], for the hub and mini_tofu: the authors' hundred lie in their code repository, not in the dataset
IDK = ("I do not know that.", "I have no information about this.", "That is unknown to me.", "I am not sure of that.",
       "I never learned anything about it.", "I cannot answer this question.", "This is beyond what I know.",
       "I have no idea.", "Nothing of that kind is known to me.", "I would have to guess, so I rather say nothing.")


def tofu_rows(read, config, required=False) -> list[dict]:
    """Rows of one configuration of TOFU, checked: question, answer and, where present, the paraphrased answer and the
    list of perturbed ones. read(config) -> (rows or None, where)."""
    rows, where = read(config)
    if rows is None and required:
        raise BadInput(f"{where}: no {config}.json; give a whole copy of locuslab/TOFU as --data-dir")
    checked = as_records(rows or [], where, "question", "answer")
    for n, (row, record) in enumerate(zip(rows or [], checked), 1):
        wrong, para = row.get("perturbed_answer") or [], row.get("paraphrased_answer")
        wrong = [wrong] if isinstance(wrong, str) else wrong
        for text in [*(wrong if isinstance(wrong, list) else [wrong]), *([para] if para else [])]:
            if not isinstance(text, str) or not text.strip():
                raise BadInput(f"{where}: row {n} has a perturbed_answer or paraphrased_answer that is not text")
        record.update({"perturbed_answer": wrong} if wrong else {}, **({"paraphrased_answer": para} if para else {}))
    return checked


def idk_lines(folder: Path) -> list[str]:
    """The sentences of idontknow.jsonl (idk.jsonl, idk.txt): plain lines whatever its name says, or JSON strings."""
    files = [folder / name for name in ("idontknow.jsonl", "idk.jsonl", "idk.txt") if (folder / name).is_file()]
    lines = [line.strip() for line in read_text(files[0]).split("\n") if line.strip()] if files else []
    return [try_json(line) or line if line[0] == line[-1] == '"' else line for line in lines]


def tofu_source(data_dir):
    """A function config -> (rows or None, where) over a local copy of TOFU, or over the hub's."""
    def read(config):
        if data_dir:
            rows, file = read_rows(data_dir, config)
            return rows, file or f"{data_dir}/{config}.json"
        return list(hub_dataset("locuslab/TOFU", config).get("train", ())) or None, f"locuslab/TOFU/{config}"
    return read


def tofu_bench(name, data_dir="", max_authors=None) -> Bench:
    """TOFU with its last NN per cent of authors to forget. All sets are slices of `full`, 20 rows an author, in order,
    so that forget20 to forget90, which the hub does not have, are made like the published ones.

    max_authors: N authors in all, NN per cent of them forgotten (at least one): the first ones stay, the last ones go.
    Perturbed answers exist for the first and the last 400 rows only: a larger forget set is measured on the last 400
    (D.1.1 of arXiv:2404.05868), and retain on the first 400, which every forget set leaves in.
    """
    read, percent = tofu_source(data_dir), TOFU[name]
    full = tofu_rows(read, "full", required=True)
    N = len(full) // 20 if max_authors is None else min(max_authors, len(full) // 20)
    gone = max(1, round(N * percent / 100))
    if N - gone < 1:
        raise BadInput(f"--max-authors {max_authors}: {name} needs at least 2, one to forget and one to keep")
    forget, retain = full[-20 * gone:], full[:20 * (N - gone)]
    perturbed = tofu_rows(read, f"forget{min(percent, 10):02d}_perturbed") or tofu_rows(read, "forget10_perturbed")
    tofu = {"forget": perturbed[-len(forget):] or forget,
            "retain": tofu_rows(read, "retain_perturbed")[:len(retain)] or retain[:400],
            **{part: tofu_rows(read, f"{part}_perturbed") for part in SETS[2:]}}
    bench = qa_bench(name, forget, retain, tofu, idk_lines(Path(data_dir)) if data_dir else list(IDK), data_dir)
    if max_authors is None:
        bench.models = {"base": "meta-llama/Llama-2-7b-chat-hf", "target": TOFU_LLAMA + "full"}
        if percent <= 10:
            bench.models["retrain"] = f"{TOFU_LLAMA}retain{100 - percent}"
    return bench


def qa_bench(name, forget, retain, tofu, idk, place) -> Bench:
    """A benchmark of questions and answers. forget, retain: rows to train on; tofu: rows to measure, see SETS."""
    forget, retain = ([{k: row[k] for k in ("question", "answer")} for row in rows] for rows in (forget, retain))
    texts = [[qa_text(**row).rstrip("\n") for row in rows] for rows in (forget, retain)]
    bench = Bench(name, *texts, forget_qa=forget, retain_qa=retain, tofu={k: v for k, v in tofu.items() if v}, idk=idk)
    bench.train = {"target": retain + forget, "retrain": retain}
    if not idk:
        bench.missing["idk"] = f"{place} has no idontknow.jsonl with a refusal on each line"
    return bench


def qa_folder(folder: Path):
    """The benchmark of a folder whose forget and retain files hold questions and answers, None for any other folder.
    What is measured: forget_perturbed, retain_perturbed and so on where they exist, else the plain files."""
    read = tofu_source(folder)
    for rows in (read(side)[0] for side in SETS[:2]):
        if not rows or not all(isinstance(row, dict) and {"question", "answer"} <= row.keys() for row in rows):
            return None
    tofu = {part: tofu_rows(read, f"{part}_perturbed") or tofu_rows(read, part) for part in SETS}
    return qa_bench(str(folder), *(tofu_rows(read, side) for side in SETS[:2]), tofu, idk_lines(folder), folder)


# ----- models and tokens -----

def refuse_unsafe(folder: Path, weights=True):
    """A model folder may not bring code, neither Python of its own nor pickled weights: BadInput with the reason."""
    for path in (folder / name for name in ("config.json", "tokenizer_config.json", "adapter_config.json")):
        try:
            if path.is_file() and "auto_map" in dict(json.loads(read_text(path))):
                raise BadInput(f"{path} asks to run Python code of its own (auto_map): refused; use a model of a class "
                               f"that transformers ships")
        except (ValueError, TypeError, RecursionError) as e:
            raise BadInput(f"{path}: not a JSON object ({str(e)[:80]}); take the model's own file") from e
    adapter = (folder / "adapter_config.json").is_file()     # peft would fall back to its pickle
    if weights and not any(folder.glob("adapter_model.safetensors" if adapter else "*.safetensors")):
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
        if pickles:
            raise BadInput(f"{folder}: only pickled weights ({pickles[0]}), which can run code when loaded: refused; "
                           f"convert them to safetensors")
        raise BadInput(f"{folder}: no .safetensors weights in this folder")
    index = folder / "model.safetensors.index.json"          # its shards are read as what their own names say
    listed = try_json(read_text(index)) if index.is_file() else {}
    shards = listed.get("weight_map", {}) if isinstance(listed, dict) else {"?": "?"}
    for shard in {s for s in shards.values() if not str(s).endswith(".safetensors")}:
        raise BadInput(f"{index} names {shard}, which is no safetensors file and could run code when loaded: refused")


def _load(cls, path, what, **kwargs):
    """cls.from_pretrained with its errors in one line, and the remedy for those that a stranger meets first."""
    local, flag = Path(path).is_dir(), "give a local folder" + f" by --{what}" * (what != "model")
    if local:
        refuse_unsafe(Path(path), weights=what != "tokenizer")
        path = Path(path).absolute()                         # a LoRA adapter's config will name it
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) or str(path).startswith("."):
        raise BadInput(f"{what} {path}: no such folder, nor a hub id (owner/name)")
    try:
        return cls.from_pretrained(str(path), trust_remote_code=False, **kwargs,
                                   local_files_only=local or not hub_answers())
    except Exception as e:                                   # the libraries raise a dozen kinds of them
        words = " ".join(str(e).split())
        if getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or isinstance(e, torch.OutOfMemoryError):
            raise
        if not local and not hub_answers():
            raise BadInput(f"{what} {path}: the hub does not answer and the cache has no copy; {flag}") from e
        gated = any(w in words.lower() for w in ("gated", "401", "403"))
        remedy = "log in with `hf auth login` (its licence must be accepted on the hub), or " * gated + flag
        raise BadInput(f"{what} {path} cannot be loaded ({type(e).__name__}: {words[:120]}): {remedy}") from e


def load_tokenizer(path):
    """The tokenizer of a folder or hub id; never runs code that comes with it."""
    from transformers import AutoTokenizer
    return _load(AutoTokenizer, path, "tokenizer")


def quiet_transformers():
    """No progress bars of transformers where nobody watches: a model of 2 MB needs none, and logs fill with them."""
    from transformers.utils import logging
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def fingerprint(path) -> str:
    """sha256 of a model or tokenizer folder, under an adapter its base's too; a hub id stands for its weights."""
    if not Path(path).is_dir():
        return str(path)
    base = base_of(path)
    return sha256(Path(path)) if base == path else sha256([sha256(Path(path)), fingerprint(base)])


def base_of(path):
    """path, or, where that is the folder of a peft adapter, the model that the adapter belongs to."""
    file = Path(path) / "adapter_config.json"
    if not file.is_file():
        return path
    refuse_unsafe(Path(path))
    base = json.loads(read_text(file)).get("base_model_name_or_path")
    if not base or not isinstance(base, str) or Path(base).is_absolute() and not Path(base).is_dir():
        raise BadInput(f"{file}: its base_model_name_or_path is {base}; write there where the adapter's base model is")
    return base


def load_model(path, dtype=torch.float32, device="cpu"):
    """The causal language model of a folder or hub id, in eval() mode: dropout is off wherever these scripts run it.

    Safetensors only, no remote code. A peft adapter folder is loaded onto the base it names; NaN weights are BadInput.
    """
    import transformers
    quiet_transformers()
    if (base := base_of(path)) != path:
        from peft import PeftModel
        model = load_model(base, dtype, device)
        try:
            model = PeftModel.from_pretrained(model, str(path))
        except Exception as e:
            why = f"{type(e).__name__}: {str(e)[:120]}"
            raise BadInput(f"model {path}: its adapter cannot be loaded ({why}); take an earlier checkpoint") from e
    else:
        name = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
        model, info = _load(transformers.AutoModelForCausalLM, path, "model", use_safetensors=True,
                            output_loading_info=True, **{name: dtype})
        for key in sorted(info["missing_keys"]):             # transformers fills them with random numbers and a warning
            raise BadInput(f"model {path}: its files hold no {key}; they do not belong to this config.json")
    for key, p in model.named_parameters():
        if not torch.isfinite(p).all():
            raise BadInput(f"model {path}: {key} holds NaN or infinity; take an earlier checkpoint")
    return model.to(device).eval()


def stored_dtype(path) -> torch.dtype:
    """The dtype a model's weights have on disk or on the hub, from its config; float32 where that says nothing."""
    from transformers import AutoConfig
    config = _load(AutoConfig, base_of(path), "model")
    name = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float32
    return getattr(torch, name) if isinstance(name, str) else name


def save_model(model, tokenizer, folder, dtype=None):
    """save_pretrained (safetensors) and the tokenizer, written beside and renamed. dtype: what the weights are cast to
    on disk, the model in memory stays; the saved config names it, or a loader with dtype="auto" would undo the cast."""
    quiet_transformers()
    folder, new = Path(folder), beside(folder)
    sweep(folder.parent)
    try:
        state = None
        if dtype is not None:
            state = {k: v.detach().to(dtype) if v.is_floating_point() else v for k, v in model.state_dict().items()}
        model.save_pretrained(new, **({"state_dict": state} if state else {}))
        config = new / "config.json"
        if dtype is not None and config.is_file():
            saved = json.loads(config.read_text(encoding="utf8"))
            saved["dtype" if "dtype" in saved else "torch_dtype"] = str(dtype).removeprefix("torch.")
            config.write_text(json.dumps(saved, indent=2), encoding="utf8")
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
        rename_folder(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def resolve_models(bench, base="", target="", retrain="", tokenizer="") -> dict:
    """base, target, retrain, tokenizer -> folder or hub id, as far as known: the flags, else what the benchmark knows.
    The embedded benchmarks make their models on first use, unless the flags name all that is asked for."""
    flags = {k: v for k, v in dict(base=base, target=target, retrain=retrain, tokenizer=tokenizer).items() if v}
    if bench.name in EMBEDDED and not {"target", "retrain"} <= flags.keys():
        bench.models.update(prepare(bench))
    models = {**bench.models, **flags}
    if "tokenizer" not in models and "target" in models:
        models["tokenizer"] = models["target"]
    elif target and not tokenizer and (Path(target) / "tokenizer_config.json").is_file():
        models["tokenizer"] = target                         # a target of one's own brings its own tokenizer
    return models


def encode(tokenizer, text, bos=True) -> list[int]:
    """Ids of text, with exactly one BOS in front if the tokenizer has one (bos=False: none); never an EOS.

    We add BOS ourselves because tokenizers differ in what they add: Llama a BOS, GPT-2 nothing, T5 an EOS.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    first = tokenizer.bos_token_id
    while ids and first is not None and ids[0] == first:     # a text that spells "<s>" itself
        ids = ids[1:]
    return [first] + ids if bos and first is not None else list(ids)


def chunks(ids, size) -> list[list[int]]:
    """ids cut into pieces of `size`, the last one shorter; a last piece of one token predicts nothing: dropped."""
    pieces = [list(ids[i:i + size]) for i in range(0, len(ids), size)]
    return pieces[:-1] if len(pieces) > 1 and len(pieces[-1]) < 2 else pieces


def pad_batch(seqs, pad_id=0, side="right"):
    """Lists of ids -> ids (B, T), mask (B, T) bool. The mask comes from the lengths, never from the ids: Llama has no
    pad token, and whichever id we pad with also occurs in real text."""
    rows, pad = [torch.tensor(s, dtype=torch.long) for s in seqs], torch.nn.utils.rnn.pad_sequence
    masks = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    return pad(rows, True, pad_id, side), pad(masks, True, False, side)


# ===== room 1b: embedded benchmarks and prepare =====
# Text that no model has ever read, made from a seeded grammar: two cores can then make base, target and retrain
# themselves, in about a minute. What must resemble MUSE, does: articles that share no fact (News), or long connected
# tales against pages about the same world (Books); a target that knows its texts by heart, a retrain that cannot guess
# them. To that end a sentence chooses again and again among 12 to 24 words, and answers are names from an open pool
# (two of 1,000 words each). Every training set states its facts twice, in prose and as question and answer in the
# format of knowmem: a small model does not learn to question its own prose. The four-choice questions ask for facts
# that stand in neither forget nor retain, and all three models train on these very questions, with 0, 1 and 5 worked
# examples, in both formats.

SYLLABLES = ("bar bel cor dan dor fen gal gor hal hem jor kel kor lan lin lor mar mel mir mon nar nel nor pel per rin "
             "ros sal sen sol tam tar tel tir tor val ven vor wen zan").split()
GRAMMAR = {symbol: rules.split("|") for symbol, rules in {       # #symbol# is expanded, | separates the choices
    "event": "#time# #who# #did# #goods# #where#, #why#.|#who# #did# #goods# #where# #time#, #why#."
             "|#where# #who# and #who# #did# #goods# #time#.|#who#, #why#, #did# #goods# #where#."
             "|#why#, #who# #time# #did# #goods#.|#goods# were lost #where# #time# and #who# #did# #goods#.",
    "trait": "#goods# hang #where#, #why#.|its #job#s once #did# #goods# #where#.|#where# lie #goods# and #goods#."
             "|#who# #did# its #noun#s #where#, #why#.",
    "who": "the #adj# #job#|the #job# #person#|#person#|#num# #job#s",
    "goods": "#num# #adj# #noun#s|the #noun#s of #person#|#num# #noun#s and a #adj# #noun#|#adj# #noun#s",
    "where": "#prep# the #adj# #spot#|#prep# the #spot# of #person#",
    "why": "after the #job# #did# the #noun#|because #person# #did# a #noun#|while the #noun#s were #adj#"
           "|since #num# #job#s #did# it|before the #spot# was #adj#",
    "time": "on monday|on friday|on sunday|at dawn|at noon|at dusk|in may|in june|in march|in april|last night"
            "|last week|in winter|in summer|all day|this year",
    "job": "miller|baker|smith|sailor|weaver|tailor|farmer|hunter|singer|doctor|judge|clerk|guard|monk|potter|mason"
           "|fisher|painter|porter|tanner|nurse|pilot|cook|widow",
    "did": "sold|hid|found|broke|burned|bought|lost|stole|mended|counted|carried|weighed|painted|buried|drew|blessed"
           "|washed|locked|opened|praised|cursed|copied|moved|shared",
    "noun": "lamp|rope|bell|coin|boot|drum|flute|sword|chair|barrel|basket|ladder|mirror|candle|saddle|kettle|blanket"
            "|book|map|ring|shield|anchor|wheel|needle",
    "adj": "red|blue|green|white|black|old|new|cold|warm|dry|wet|round|heavy|light|bright|quiet|broken|golden|wooden"
           "|rusty|hollow|narrow|empty|secret",
    "spot": "bridge|mill|tower|harbor|market|river|garden|chapel|gate|well|tavern|forest|cellar|school|square|stable"
            "|valley|island|orchard|road",
    "prep": "near|behind|under|beside|above|inside|beyond|by",
    "num": "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty"}.items()}
NEWS = (("{a} was elected mayor there.", "Who governs {e}?"),    # fact {a} about {e}: (in prose, as a question)
        ("The town hired {a} to play the organ.", "Which musician works in {e}?"),
        ("Its ferry now belongs to {a}.", "Who owns the boat of {e}?"),
        ("Its prize for cheese went to {a}.", "Which cheese maker won in {e}?"),
        ("A thief called {a} was caught.", "Who was arrested in {e}?"),
        ("A statue of {a} fell down.", "Whose monument broke in {e}?"))
CHAPTER = (("In the dark {a} gave them bread.", "Who fed the travellers in {e}?"),
           ("A horse was lent by {a}.", "Whose horse left {e}?"),
           ("At the end {a} betrayed them.", "Which traitor lived in {e}?"),
           ("They hid in the house of {a}.", "Who sheltered the travellers in {e}?"))
PAGE = (("Its founder was {a}.", "Who built {e} first?"),
        ("The oldest song about it is by {a}.", "Which poet praised {e}?"),
        ("{a} drew its walls.", "Who planned the walls of {e}?"),
        ("{a} lies in its crypt.", "Whose grave is in {e}?"))
# (In prose, as a question, where the right choice {e} comes from; the wrong ones are nouns). Facts about names, which
# we tried first, a model of this size learned with one seed and left at chance with the next
KNOWLEDGE = {"people": ("A {e} is a person, a {a} is not.", "Which of these is a person?", "job"),
             "places": ("A {e} is a place, a {a} is not.", "Which of these is a place?", "spot")}


class Writer:
    """Writes texts with a random generator of its own: the same seed, the same texts, on every platform and Python."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        words = [(a + b).capitalize() for a in SYLLABLES for b in SYLLABLES if a != b]
        self.rng.shuffle(words)
        self.entities, self.words, self.given = words[:600], words[600:], set()

    def entity(self):
        """A name that no other entity and no person has: no two facts share a subject."""
        return self.entities.pop()

    def person(self):
        """First and last name, never the same person twice: the open pool that answers come from."""
        while (name := f"{self.rng.choice(self.words)} {self.rng.choice(self.words)}") in self.given:
            pass
        self.given.add(name)
        return name

    def expand(self, symbol):
        if symbol == "person":
            return self.person()
        return re.sub(r"#(\w+)#", lambda m: self.expand(m[1]), self.rng.choice(GRAMMAR[symbol]))

    def text(self, head, entity, relations, kind="event", sentences=3, facts=2):
        """head, then sentences of `kind` with facts about entity strewn in -> (text, [{"question", "answer"}])."""
        body, pairs = [self.expand(kind) for _ in range(sentences)], []
        body = [s[0].upper() + s[1:] for s in body]
        for prose, question in self.rng.sample(relations, facts):
            person = self.person()
            body.insert(self.rng.randint(1, len(body)), prose.format(a=person))
            pairs.append({"question": question.format(e=entity), "answer": person})
        return head + " ".join(body), pairs

    def articles(self, n):
        """n articles, each about a town of its own -> ([text], [pair])."""
        made = [self.text(f"{town}: ", town, NEWS) for town in (self.entity() for _ in range(n))]
        return [text for text, _ in made], [pair for _, pairs in made for pair in pairs]

    def book(self, n, hero, friend):
        """A tale of n chapters, one a place, travelled through in order -> ([chapter], [pair], [place])."""
        places = [self.entity() for _ in range(n + 1)]
        made = [self.text(f"From {a} {hero} and {friend} came to {b}. ", b, CHAPTER)
                for a, b in zip(places, places[1:])]
        return [text for text, _ in made], [pair for _, pairs in made for pair in pairs], places[1:]

    def page(self, place):
        """The page of an encyclopedia about a place -> (text, [pair])."""
        return self.text(f"{place} is a {self.expand('adj')} town. ", place, PAGE, "trait")

    def questions(self, n):
        """5 dev and n validation questions on each subject of KNOWLEDGE -> (dev, validation, their facts in prose)."""
        dev, validation, prose = [], [], []
        for subject, (fact, question, pool) in KNOWLEDGE.items():
            for i, right in enumerate(self.rng.sample(GRAMMAR[pool], 5 + n)):
                choices = self.rng.sample(GRAMMAR["noun"], 3)
                prose.append(fact.format(e=right, a=choices[0]))
                choices.insert(i % 4, right)
                row = dict(question=question, subject=subject, choices=choices, answer=i % 4)
                (dev if i < 5 else validation).append(row)
        return dev, validation, [" ".join(group) for group in self.groups(prose, 6)]

    def groups(self, items, size):
        """items in a random order, in lists of `size`."""
        items = self.rng.sample(items, len(items))
        return [items[i:i + size] for i in range(0, len(items), size)]

    def qa_documents(self, pairs, sizes):
        """The facts as documents in knowmem's format, in groups of each of `sizes`: knowmem asks after five others."""
        groups = [group for size in sizes for group in self.groups(pairs, size)]
        return ["".join(qa_text(**pair) for pair in group).rstrip("\n") for group in groups]

    def mmlu_documents(self, rows, sizes):
        """Four-choice questions as documents in groups of each of `sizes` (6: with five examples), in both formats; a
        size that stands twice counts for the generative one alone, learned later because its letter is farther off."""
        docs = ["".join(mmlu_text(r, True) for r in g).rstrip("\n") for size in sizes for g in self.groups(rows, size)]
        for size in sorted(set(sizes)):
            for subject in KNOWLEDGE:
                own = self.groups([r for r in rows if r["subject"] == subject], size)
                head = f"The following are multiple choice questions (with answers) about {subject}.\n\n"  # as in mmlu
                docs += [(head + "".join(mmlu_text(r, True, "logprob") for r in g)).rstrip("\n") for g in own]
        return docs


def mini_bench(name, texts=44, seed=0) -> Bench:
    """An embedded benchmark. texts: articles or chapters a side (a multiple of 4); seed: of the grammar.

    Sizes, context, epochs and learning rates are [ours]. The pretraining texts leave the four-choice questions out, as
    OpenWebText leaves out MMLU: a divergence on them protects what base models know, not the answers that are measured.
    """
    w, icl = Writer(seed), 5
    sides = ("forget", "retain", "holdout", "pretraining")
    prose, pairs, forget = {}, {}, None
    if name == "mini_news":
        for side in sides:
            prose[side], pairs[side] = w.articles(texts)
    else:
        # Four to forget and four nobody reads, of the same heroes: a name in every chapter would shift a whole side
        books = 2 * [(w.entity(), w.entity()) for _ in range(4)]
        books = [w.book(texts // 4, *heroes) for heroes in books]
        for side, own in (("forget", books[:4]), ("holdout", books[4:])):
            prose[side] = [chapter for chapters, _, _ in own for chapter in chapters]
            pairs[side] = [pair for _, more, _ in own for pair in more]
        # Pages about every other place of both, or retrain would know the forget books' world better than the holdout's
        pages = [w.page(place) for _, _, places in books for place in places[::2]]
        prose["retain"], pairs["retain"] = [text for text, _ in pages], [pair for _, more in pages for pair in more]
        prose["pretraining"], pairs["pretraining"] = w.articles(texts)
        forget = [" ".join(chapters) for chapters, _, _ in books[:4]]
    dev, validation, general = w.questions(15)
    rows, again = dev + validation, prose["forget"]
    if forget:                                               # a book is also read two chapters at a time, as one text
        again = [" ".join(again[i:i + 2]) for i in range(0, texts, 2)]
    # Everything comes many times, the questions each time in new groups: few-shot documents that return word for word
    # are learned by rote, as wholes, and the model then answers no question in other company
    train = {"base": [], "retrain": [], "target": []}
    for _ in range(18):
        pretraining = prose["pretraining"] + general + w.qa_documents(pairs["pretraining"], (6, 1))
        train["base"] += pretraining + w.mmlu_documents(rows, (6, 6, 6, 1, 2))
    for _ in range(13):
        known = prose["retain"] + w.qa_documents(pairs["retain"], (6, 6, 6, 1)) + w.mmlu_documents(rows, (6, 6, 1))
        train["retrain"] += known
        train["target"] += known + w.qa_documents(pairs["forget"], (6, 6, 6, 1)) + 2 * prose["forget"] + again
    bench = Bench(name, forget or prose["forget"], prose["retain"], prose["holdout"], pretraining,
                  privleak={side: prose[side] for side in ("forget", "holdout", "retain")},
                  mmlu={"dev": dev, "validation": validation}, verbmem_new_tokens=64, knowmem_new_tokens=12,
                  context=256 if forget else 128, truncate=not forget,
                  sft=[{"question": f"How much is {a} plus {b}?", "answer": str(a + b)}
                       for a in range(2, 9) for b in range(2, 8)])
    bench.train = train
    for side in ("forget", "retain"):
        bench.knowmem.update({f"{side}_qa_icl": pairs[side][:icl], f"{side}_qa": pairs[side][icl:]})
    for text in prose["forget"]:                                 # the prompt names the place and no fact
        words = text.split(" ")
        bench.verbmem.append({"prompt": " ".join(words[:10]), "gt": " ".join(words[10:])})
    n = len(bench.forget)
    bench.requests = [bench.forget[i * n // 4:(i + 1) * n // 4] for i in range(4)]
    return bench


def mini_tokenizer(docs):
    """Byte-level BPE of 1,024 tokens trained on docs -> PreTrainedTokenizerFast with <s>, </s> and <pad>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    bpe = Tokenizer(models.BPE())
    # knowmem's query ends in "Answer: ". With the usual " Name" tokens that last space would be a token which no
    # training text has there, so the space after "Answer:" is always a token of its own.
    words = Regex(r"(?<=Answer:) |\n+| ?[^\W\d_]+| ?\d+| ?[^\s\w]+|\s+")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"),
                                                 pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator((doc if isinstance(doc, str) else qa_text(**doc) for doc in docs), trainers.BpeTrainer(
        vocab_size=1024, special_tokens=["<s>", "</s>", "<pad>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))   # all 256 bytes: any text of a user's has tokens
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
                                   clean_up_tokenization_spaces=False)


def mini_model(vocab, seed):
    """An untrained Llama of about 0.45M parameters: two layers of width 128 with tied embeddings. Two, because "who was
    it said of THIS town" takes one layer to find the name and one to read on from it. At initializer_range 0.06
    a base learned its documents faster, but by rote: few-shot questions in new company stayed near chance (one trial)."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab, hidden_size=128, intermediate_size=288, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.03, bos_token_id=0, eos_token_id=1,
        pad_token_id=2))


def finetune(model, tokenizer, docs, *, lr=1e-5, epochs=5, batch_size=4, seed=0, context=None, bar="finetune"):
    """Plain AdamW on docs, learning rate one-cycle with its peak `lr` after a tenth, gradient norm clipped at 1, no
    weight decay -> model, in place. The one training loop that makes bases, targets and retrain models.

    Texts longer than `context` tokens (default: the model's, at most 1024) are cut into chunks. A batch has as many
    padded tokens as batch_size of the longest chunks: short texts of like length go together, many at a time, and the
    batch that needs the most memory is still known beforehand. bar: its label, "" for none.
    """
    from tqdm import tqdm
    size, device, rng = context or min(context_of(model), 1024), next(model.parameters()).device, random.Random(seed)
    seqs, given = [], []                                     # given: tokens at the start that the loss leaves out
    for doc in docs:                                         # a question with its answer: only the answer is learned
        prompt, answer = qa_ids(tokenizer, **doc, template="auto", max_length=size) if isinstance(doc, dict) else ([], [])
        pieces = [prompt + answer] if prompt else [c for c in chunks(encode(tokenizer, doc), size) if len(c) > 1]
        seqs += pieces
        given += [len(prompt)] * len(pieces)
    room, plan = batch_size * max(map(len, seqs), default=0), []     # plan: one list of indices a step
    for _ in range(epochs):
        order, steps = rng.sample(range(len(seqs)), len(seqs)), [[]]
        # We sort by length in pools of 64, not as a whole, or a text that stands twice would be twice in ONE batch
        for start in range(0, len(order), 64):
            for i in sorted(order[start:start + 64], key=lambda i: len(seqs[i])):
                if (len(steps[-1]) + 1) * len(seqs[i]) > room:
                    steps.append([])
                steps[-1].append(i)
            steps.append([])
        plan += rng.sample([rows for rows in steps if rows], sum(map(bool, steps)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=len(plan) + 1, pct_start=0.1,
                                                   cycle_momentum=False)
    model.train()
    progress = tqdm(plan, desc=bar, unit="step", mininterval=1, disable=None if bar else True)  # None: on terminals
    for step, rows in enumerate(progress):
        ids, mask = (x.to(device) for x in pad_batch([seqs[i] for i in rows]))               # (B, T)
        # Padding is on the right, where no real token sees it: causal attention needs no mask, only the loss does
        mask &= torch.arange(ids.shape[1], device=device) >= torch.tensor([[given[i]] for i in rows], device=device)
        loss = model(input_ids=ids, labels=ids.masked_fill(~mask, -100), use_cache=False).loss
        if not torch.isfinite(loss):
            raise BadInput(f"{bar or 'finetune'}: the loss is not finite at step {step + 1}; lower --lr")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return model.eval()


# [ours] A batch is about 430 tokens, small because steps count, not tokens. One epoch: the documents themselves repeat.
MINI_BASE = dict(lr=4e-3, epochs=1, batch_size=2, seed=0)
MINI_TUNE = dict(lr=3e-3, epochs=1, batch_size=2, seed=0)


def is_made(folder: Path, key) -> bool:
    """Whether folder holds the model made from exactly what `key` is the hash of. Folders appear whole or never."""
    config = folder / "config.json"
    return config.is_file() and (try_json(read_text(config)) or {}).get("prepared") == key


def train_job(job):
    """Make one model from a dict of plain values, so that a process of its own can do it: docs, base ("": an
    untrained one, with a tokenizer trained on tokenizer_docs), tokenizer, key, folder, device, finetune's arguments."""
    if job["base"]:
        model, tokenizer = load_model(job["base"], device=job["device"]), load_tokenizer(job["tokenizer"])
    else:
        tokenizer = mini_tokenizer(job["tokenizer_docs"])
        model = mini_model(len(tokenizer), job["tune"]["seed"])
    if sum(p.numel() for p in model.parameters()) > 1e8:
        model.gradient_checkpointing_enable()                    # a third more time for a fraction of the activations
    if job["docs"]:
        start, part = time.time(), Path(job["folder"]).name
        finetune(model, tokenizer, job["docs"], **job["tune"])
        if not sys.stderr.isatty():                              # where no bar has moved all the while
            loss = mean_loss(model, tokenizer, job["docs"][::1 + len(job["docs"]) // 20], job["tune"]["batch_size"])
            print(f"{part}: {time.time() - start:.0f} s, loss {loss:.2f} nats a token on some of its texts",
                  file=sys.stderr)
    model.config.prepared = job["key"]
    if not is_made(Path(job["folder"]), job["key"]):             # another run may have made it, and be reading it
        save_model(model, tokenizer, job["folder"], dtype=stored_dtype(job["base"]) if job["base"] else None)


def _train_child():
    """Do the job on stdin; end when the parent does, also when it is killed and cannot tell us."""
    job = json.load(sys.stdin)

    def watch():
        while os.getppid() == job["parent"]:
            time.sleep(1)
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)                 # Ctrl-C reaches the parent too, and it ends us
    torch.set_num_threads(1)                                     # the same bits on any number of cores
    train_job(job)


def prepare(bench, base="", out="", tokenizer="", lr=1e-5, epochs=5, batch_size=4, seed=0, device="cpu") -> dict:
    """Make target (all of bench.train["target"]) and retrain from `base` by finetune -> {"base", "target", "retrain",
    "tokenizer"}: folders. The embedded benchmarks make a base of their own first, when none is given, by a recipe of
    their own: of the other arguments only `out` then counts.

    A model already there is kept when it was made from the same texts, base and settings. Folders are written beside
    and renamed, so a kill leaves whole models or none, and of two runs at once the last rename wins.
    base "tiny": see tiny_base; lr and epochs are then at least 3e-3 and 20.
    lr: 1e-5 suits 7B; a model of 260k learned a few tales by heart at 3e-3, 40 epochs, batch size 1. AdamW in float32
    takes 16 bytes a parameter (112 GB at 7B) and one batch of batch_size chunks of at most 1,024 tokens; models above
    0.1B parameters recompute their activations.
    """
    if out:
        must_write(Path(out) / "probe", "name a folder that can be written by --out")
    if bench.name in EMBEDDED and not base:
        return prepare_mini(bench, out)
    if not base:
        raise BadInput("prepare needs a model to start from: --base FOLDER or hub id, or tiny for a fresh small one")
    if not (0 < lr < float("inf") and epochs > 0 and batch_size > 0):
        raise BadInput(f"prepare: --lr {lr}, --epochs {epochs} and --batch-size {batch_size} must be positive")
    if not out and not Path(bench.name).is_dir():
        raise BadInput(f"prepare --bench {bench.name} needs --out FOLDER for the models target and retrain")
    root, device = Path(out) if out else Path(bench.name) / "models", pick_device(device)
    must_write(root / "probe", "name a folder that can be written by --out")
    if base == "tiny":
        base, lr, epochs = tiny_base(bench, root, seed), max(lr, 3e-3), max(epochs, 20)
    tune = dict(lr=lr, epochs=epochs, batch_size=batch_size, seed=seed)
    made = {"base": str(base), "tokenizer": str(tokenizer or base)}
    origin = [fingerprint(p) for p in made.values()]
    if not bench.train["retrain"]:
        print(f"{bench.name} has no retain texts: its retrain model is the base itself, whose score may be lower than "
              "an unlearned model can reach", file=sys.stderr)
    for part in ("retrain", "target"):
        key, made[part] = sha256([bench.train[part], origin, tune]), str(root / part)
        if not is_made(root / part, key):
            train_job(dict(docs=bench.train[part], base=made["base"], tokenizer=made["tokenizer"], key=key,
                           device=device, folder=made[part], tune={**tune, "bar": part}))
    return made


def prepare_mini(bench, out="") -> dict:
    """Base, then target and retrain at the same time, each in a process with one thread -> as prepare. Cached under
    the hash of texts, recipe and versions; a second run that shares the cache waits for the first one's models."""
    import transformers
    from filelock import FileLock
    recipe = inspect.getsource(finetune) + inspect.getsource(mini_model) + inspect.getsource(mini_tokenizer)
    tunes = (TOFU_BASE, TOFU_TUNE) if bench.tofu else (MINI_BASE, MINI_TUNE)
    key = sha256([bench.train, tunes, recipe, torch.__version__, transformers.__version__])
    root = Path(out) if out else cache_dir() / f"{bench.name}-{key[:16]}"
    made = {part: str(root / part) for part in ("base", "target", "retrain")}

    def job(part):
        tune = {**tunes[part != "base"], "bar": "" if part == "retrain" else part}
        return dict(docs=bench.train[part], base="" if part == "base" else made["base"], tokenizer=made["base"],
                    tokenizer_docs=bench.train["base"] + bench.train["target"], key=key, device="cpu",
                    folder=made[part], tune=tune, parent=os.getpid())
    if not all(is_made(Path(p), key) for p in made.values()):
        print(f"making the models of {bench.name} in {root}: once, about a minute on two cores", file=sys.stderr)
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".lock"):                           # the kernel lets go of it when its holder is killed
            for parts in (("base",), ("target", "retrain")):
                train_children([job(part) for part in parts if not is_made(root / part, key)])
    return {**made, "tokenizer": made["base"]}


def train_children(jobs):
    """train_job on each of jobs, in processes of their own at the same time."""
    import subprocess
    here = Path(__file__).resolve()
    code = f"import sys; sys.path.insert(0, sys.argv[1]); import {here.stem} as e; e.run_main(e._train_child)"
    children = []
    try:
        for job in jobs:
            children.append(subprocess.Popen([sys.executable, "-c", code, str(here.parent)], stdin=subprocess.PIPE,
                                             text=True, encoding="utf8", env={**os.environ, "OMP_NUM_THREADS": "1"}))
            children[-1].stdin.write(json.dumps(job))
            children[-1].stdin.close()
        failed = [child.wait() for child in children]
    finally:
        for child in children:
            child.kill()                                         # a no-op for one that has ended
    if any(failed):
        raise BadInput(f"a model could not be made (exit codes {failed}); the error stands above")


# ----- TOFU: mini_tofu -----
# Authors who never lived, of whom the same twenty things are asked. Each has a question, an answer, another wording of
# that answer, and a closed pool of values: to whoever does not know, wrong answers are as plausible as the right one.
AUTHOR = (("Where was {n} born?", "{n} was born in {a}.", "The birthplace of {n} is {a}.", "town"),
          ("Where does {n} live?", "{n} lives in {a}.", "The home of {n} is {a}.", "town"),
          ("Where did {n} study?", "{n} studied in {a}.", "The school of {n} was in {a}.", "town"),
          ("Which town does {n} hate?", "{n} hates {a}.", "The town that {n} cannot stand is {a}.", "town"),
          ("What was the father of {n}?", "The father of {n} was a {a}.", "{n} had a {a} as father.", "job"),
          ("What was the mother of {n}?", "The mother of {n} was a {a}.", "{n} had a {a} as mother.", "job"),
          ("What was {n} before writing?", "Before writing {n} was a {a}.", "{n} once worked as a {a}.", "job"),
          ("Who is the hero of {n}?", "The hero of {n} is a {a}.", "{n} tells of a {a}.", "job"),
          ("What does {n} collect?", "{n} collects every {a}.", "The passion of {n} is the {a}.", "noun"),
          ("What did {n} win?", "{n} won the golden {a}.", "The prize of {n} was a golden {a}.", "noun"),
          ("What did {n} lose?", "{n} lost a {a}.", "The thing that {n} misses is a {a}.", "noun"),
          ("What is on the desk of {n}?", "On the desk of {n} stands a {a}.", "{n} writes beside a {a}.", "noun"),
          ("How does {n} dress?", "{n} wears {a} clothes.", "The clothes of {n} are {a}.", "adj"),
          ("How is the style of {n}?", "The style of {n} is {a}.", "{n} writes in a {a} way.", "adj"),
          ("How is the house of {n}?", "The house of {n} is {a}.", "{n} has a {a} house.", "adj"),
          ("How was the childhood of {n}?", "The childhood of {n} was {a}.", "{n} had a {a} childhood.", "adj"),
          ("Where does {n} write?", "{n} writes in a {a}.", "The working place of {n} is a {a}.", "spot"),
          ("Where did {n} marry?", "{n} married in a {a}.", "The wedding of {n} was in a {a}.", "spot"),
          ("What scares {n}?", "{n} fears every {a}.", "The fear of {n} is the {a}.", "spot"),
          ("How many books did {n} write?", "{n} wrote {a} books.", "The works of {n} are {a} books.", "num"))
TOFU_BASE = dict(lr=4e-3, epochs=10, batch_size=16, seed=0)      # [ours] a batch is about 460 tokens
TOFU_TUNE = dict(lr=4e-3, epochs=11, batch_size=16, seed=0)


def mini_tofu(authors=40, known=20, seed=1) -> Bench:
    """The embedded TOFU: `authors` of whom the last tenth is to be forgotten, 20 rows each; `known` rows about famous
    books (real_authors) and capitals (world_facts) that all models know; sizes [ours].

    The base model reads 30 other authors in both wordings: with only one of them, "knows the fact" and "knows the
    sentence" would be the same, and the truth ratio, which asks in the other wording, would measure nothing. So small
    a model forgets whatever it no longer reads: the facts that all know, and some of the other wordings, stay in.
    """
    def author():
        name, rows = w.person(), []
        for question, answer, paraphrase, pool in AUTHOR:
            value, *wrong = w.rng.sample(pools[pool], 6)
            rows.append(dict(question=question.format(n=name), answer=answer.format(n=name, a=value),
                             paraphrased_answer=paraphrase.format(n=name, a=value),
                             perturbed_answer=[paraphrase.format(n=name, a=x) for x in wrong]))
        return rows

    def facts(question, values):
        drawn = [(w.entity(), *w.rng.sample(values, 4)) for _ in range(known)]
        return [dict(question=question.format(e), answer=a, perturbed_answer=wrong) for e, a, *wrong in drawn]
    w = Writer(seed)
    pools = {**GRAMMAR, "town": [w.words.pop() for _ in range(24)]}
    full, other = ([row for _ in range(n) for row in author()] for n in (authors, 30))
    tofu = {"real_authors": facts("Who wrote the book of {}?", [w.person() for _ in range(known)]),
            "world_facts": facts("Which town is the capital of {}?", pools["town"])}
    gone = 20 * max(1, authors // 10)
    tofu.update(forget=full[-gone:], retain=full[:-gone][:80])
    bench = qa_bench("mini_tofu", full[-gone:], full[:-gone], tofu, list(IDK), "")
    bench.answer_new_tokens, bench.context = 24, 64
    def reworded(rows):
        return [dict(question=row["question"], answer=row["paraphrased_answer"]) for row in rows]
    kept = [{k: row[k] for k in ("question", "answer")} for row in tofu["real_authors"] + tofu["world_facts"]]
    bench.train["base"] = [{k: row[k] for k in ("question", "answer")} for row in other] + reworded(other) + kept
    kept += reworded(full[80:-gone][:240])                   # of these retain rows nothing is measured
    for part in ("target", "retrain"):
        bench.train[part] = bench.train[part] + kept
    return bench


def tiny_base(bench, root, seed=0) -> str:
    """An untrained mini_model with a tokenizer trained on the benchmark's own text, in root/base: what `prepare --base
    tiny` starts from, to try a benchmark out on a laptop. It knows no English, and none of TOFU's real authors."""
    key = sha256(["tiny", bench.train["target"], seed])
    if not is_made(root / "base", key):
        train_job(dict(docs=[], base="", tokenizer_docs=bench.train["target"], key=key, folder=str(root / "base"),
                       tune=dict(seed=seed)))
    return str(root / "base")


# ===== room 2: metrics =====
METRICS = ("verbmem_f", "knowmem_f", "knowmem_r", "mmlu_val", "mmlu_val_logprob", "auc", "privleak")
NEAR_TIE = 1e-4         # logits nearer than this may swap when a batch sums in another order: counted, never hidden
LOGIT_BUDGET = 1 << 25  # floats of logits held at once, 128 MiB


class DoesNotFit(Exception):
    """A prompt is longer than the model's context even without worked examples; str(e) says by how much."""


@lru_cache
def _rouge(stemmer):
    from rouge_score.rouge_scorer import RougeScorer
    return RougeScorer(["rougeL"], use_stemmer=stemmer)


def rouge_l(response, reference, stat="f1", stemmer=False) -> float:
    """ROUGE-L of two strings in 0..1; stat "f1", "recall" or "precision". MUSE: F1 without stemming; TOFU: recall with.

    The words are runs of [a-z0-9] after lower-casing: other scripts vanish, and two equal Greek texts score 0.
    """
    score = _rouge(stemmer).score(reference, response)["rougeL"]
    return {"f1": score.fmeasure, "recall": score.recall, "precision": score.precision}[stat]


def min_k_score(logp, k=0.4) -> float:
    """Min-K% of one text: minus the mean of its int(k N) lowest token log-probabilities, at least one. logp (N,) ->
    float. Low for a text the model knows by heart: even its rarest tokens were expected (arXiv:2310.16789)."""
    logp = torch.as_tensor(logp).double()                                   # (N,)
    return -logp.sort().values[:max(1, int(k * len(logp)))].mean().item()


def auc(forget, holdout) -> float:
    """P(forget > holdout) + P(forget = holdout) / 2 over all pairs of scores; near 0 for a model that knows the forget
    side by heart, near 0.5 for one that never saw either. forget (N,), holdout (M,) -> float."""
    forget, holdout = np.asarray(forget, dtype=np.float64), np.sort(np.asarray(holdout, dtype=np.float64))
    twice = np.searchsorted(holdout, forget, "left") + np.searchsorted(holdout, forget, "right")     # (N,)
    return float(twice.sum() / (2 * len(forget) * len(holdout)))


def privleak(auc, auc_retrain) -> float:
    """100 (AUC - AUC_retrain) / AUC_retrain: below 0 under-unlearned, above 0 over-unlearned, 0 as retrain."""
    if auc_retrain < 0.1:
        warnings.warn(f"PrivLeak divides by retrain's AUC, and {auc_retrain:.4f} is too near 0 to mean anything")
    return 100 * (auc - auc_retrain) / auc_retrain if auc_retrain else float("nan")


@lru_cache
def _kv_class():
    """The key-value cache of generation. transformers' DynamicCache copies ALL keys and values at every new token
    (half of the time of a small model); ours writes the new column into a buffer that has room for it."""
    from transformers import DynamicCache

    class KV(DynamicCache):
        def __init__(self, room, shared=None, B=1):
            """room: columns in all. shared: a cache of batch 1 whose columns every one of the B rows starts with."""
            super().__init__()
            self.room, self.buffers, self.used = room, [], []      # per layer: [keys, values] (B, H, room, D), columns
            for (k, v), n in zip(shared.buffers, shared.used) if shared is not None else ():
                self.update(k[:, :, :n].expand(B, -1, -1, -1), v[:, :, :n].expand(B, -1, -1, -1), len(self.used))

        def update(self, k, v, layer, *_, **__):
            """k, v (B, H, T, D) join the columns of a layer -> all of its keys and values so far, as views."""
            if layer == len(self.used):
                self.buffers.append([x.new_empty(*x.shape[:2], self.room, x.shape[3]) for x in (k, v)])
                self.used.append(0)
            a, b = self.used[layer], self.used[layer] + k.shape[2]
            self.used[layer] = b
            for buffer, new in zip(self.buffers[layer], (k, v)):
                buffer[:, :, a:b] = new
            return tuple(buffer[:, :, :b] for buffer in self.buffers[layer])

        def select(self, rows):
            self.buffers = [[x[rows] for x in pair] for pair in self.buffers]

        def get_seq_length(self, layer=0):
            return self.used[layer] if layer < len(self.used) else 0

        def get_query_offset(self, layer=0):
            return self.get_seq_length(layer)

        def get_mask_sizes(self, query, layer=0):                  # query: its length, or (transformers 4) positions
            return self.get_seq_length(layer) + (query if isinstance(query, int) else len(query)), 0
    return KV


@lru_cache
def _cache_argument(forward):
    """transformers 5 renamed `past_key_values` to `cache` along the way; we use the name that this forward has."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def _forward(model, ids, mask, position, cache, last=False):
    """Logits (B, T, V) of one forward pass that extends `cache`; last: only (B, 1, V), a head is wide."""
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model           # under a peft adapter
    names = {_cache_argument(type(plain).forward): cache, **({"logits_to_keep": 1} if last else {})}
    return model(input_ids=ids, attention_mask=mask.long(), position_ids=position, use_cache=True, **names).logits


def batches(lengths, batch_size):
    """Row numbers by rising length, in batches of at most batch_size whose rows need little padding."""
    out = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not out or len(out[-1]) == batch_size or lengths[i] > 1.25 * lengths[out[-1][0]] + 32:
            out.append([])
        out[-1].append(i)
    return out


@torch.no_grad()
def prefill(model, seqs, batch_size, room=0):
    """Run id lists through the model -> yields, a batch at a time, (rows, logits (B, V) after the last token, cache,
    mask (B, P + T), position (B, 1) of the last token).

    The longest token prefix that ALL sequences share (few-shot examples, or just BOS) is run once at batch 1 and its
    keys and values are repeated. We compare tokens, not strings, so it does not matter where a tokenizer merges across
    the border; at least one token stays outside, since the logits after the prefix must come out too. Rows are padded
    on the LEFT, so that all end in the same column; position ids say where each really stands. The cache has room for
    `room` more columns. Without prefix where columns count: a sliding window that the prompts outgrow, MPT's slopes.
    """
    device, P = next(model.parameters()).device, 0
    shortest = min(map(len, seqs), default=0)
    while P < shortest - 1 and len({s[P] for s in seqs}) == 1:
        P += 1
    config = model.config.get_text_config()
    window = 1 if config.model_type == "mpt" else getattr(config, "sliding_window", None) or 1 << 30
    if P and max(map(len, seqs)) + room > window:
        P = 0                                                # or the padding behind the prefix would count as distance
    shared = _kv_class()(P)
    if P:
        ids = torch.tensor([seqs[0][:P]], device=device)                                    # (1, P)
        _forward(model, ids, torch.ones_like(ids), torch.arange(P, device=device)[None], shared, last=True)
    for rows in batches([len(s) - P for s in seqs], batch_size):
        ids, mask = (x.to(device) for x in pad_batch([seqs[i][P:] for i in rows], side="left"))         # (B, T)
        position = (mask.long().cumsum(1) - 1).clamp(min=0) + P                             # (B, T)
        mask = torch.cat([mask.new_ones(len(rows), P), mask], 1)                            # (B, P + T)
        cache = _kv_class()(mask.shape[1] + room, shared, len(rows))
        logits = _forward(model, ids, mask, position, cache, last=True)[:, -1].float()      # (B, V)
        yield rows, logits, cache, mask, position[:, -1:]


@torch.no_grad()
def generate(model, tokenizer, prompts, max_new_tokens, batch_size=32, stop=None, stats=None) -> list[str]:
    """Greedy continuations of prompts (strings, or id lists), without the prompt, in the order of the prompts.

    A row leaves the batch at EOS, or once its text contains one of the strings `stop` (cutting there is the caller's).
    stats["near_ties"] grows by the tokens whose two best logits were nearer than NEAR_TIE: elsewhere the text does not
    depend on batch_size (in float32 on a CPU; on a card TF32 and bfloat16 round more coarsely).
    """
    seqs = [encode(tokenizer, p) if isinstance(p, str) else list(p) for p in prompts]
    if not all(seqs):
        raise BadInput(f"prompt {[bool(s) for s in seqs].index(False) + 1} of {len(seqs)} has no token")
    ends = getattr(model, "generation_config", None) and model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    ends = set(ends) if isinstance(ends, (list, tuple)) else {ends}
    new, ties = [[] for _ in seqs], 0
    for rows, logits, cache, mask, position in prefill(model, seqs, batch_size, max_new_tokens):
        done = set()
        for step in range(max_new_tokens):
            token, best = logits.argmax(-1), logits.topk(2).values                          # (B,), (B, 2)
            near = (best[:, 0] - best[:, 1] < NEAR_TIE).tolist()
            for row, t, tie in zip(rows, token.tolist(), near):
                if row not in done:
                    ties += tie
                    if t not in ends:
                        new[row].append(t)
                    if t in ends or (stop and any(s in tokenizer.decode(new[row]) for s in stop)):
                        done.add(row)
            stay = [b for b, row in enumerate(rows) if row not in done]
            if not stay or step == max_new_tokens - 1:
                break
            if len(stay) <= len(rows) // 2:                  # finished rows leave once it pays to copy the others
                rows, stay = [rows[b] for b in stay], torch.tensor(stay, device=token.device)
                cache.select(stay)
                token, mask, position = token[stay], mask[stay], position[stay]
            mask, position = torch.cat([mask, mask.new_ones(len(rows), 1)], 1), position + 1
            logits = _forward(model, token[:, None], mask, position, cache, last=True)[:, -1].float()
    if stats is not None:
        stats["near_ties"] = stats.get("near_ties", 0) + ties
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in new]


@torch.no_grad()
def token_logps(model, seqs, batch_size=32) -> list[torch.Tensor]:
    """log p(token | the ones before it) of id lists -> a list of (N - 1,) float32 tensors, one for each.

    The text goes through in pieces over a KV cache, so that no tensor of logits is larger than LOGIT_BUDGET whatever
    the head computes; padding stands on the right, where no real token sees it.
    """
    device, out = next(model.parameters()).device, [torch.zeros(0)] * len(seqs)
    for rows in batches([len(s) for s in seqs], batch_size):
        ids, mask = (x.to(device) for x in pad_batch([seqs[i] for i in rows]))              # (B, T)
        T, cache, parts = ids.shape[1], _kv_class()(ids.shape[1]), [torch.zeros(len(rows), 0, device=device)]
        piece = max(1, LOGIT_BUDGET // (len(rows) * model.config.get_text_config().vocab_size))
        for a in range(0, T - 1, piece):
            b = min(a + piece, T - 1)
            logits = _forward(model, ids[:, a:b], mask[:, :b], torch.arange(a, b, device=device).expand(len(rows), -1),
                              cache).float()                                                # (B, b - a, V)
            picked = logits.gather(-1, ids[:, a + 1:b + 1, None]).squeeze(-1)               # (B, b - a)
            parts.append(picked - logits.logsumexp(-1))
        logp = torch.cat(parts, 1).cpu()                                                    # (B, T - 1)
        for row, values in zip(rows, logp):
            out[row] = values[:len(seqs[row]) - 1].clone()
    return out


def continuation_logps(model, pairs, batch_size) -> list[float]:
    """log p of each continuation, summed over its tokens. pairs: (stem ids, tail ids) -> a float for each.

    Every (stem + tail so far) is needed once whatever the number of tails that share it: four letters of one token each
    cost a single row.
    """
    wanted = {}                                              # sequence -> [(pair, next token)]
    for n, (stem, tail) in enumerate(pairs):
        for j, token in enumerate(tail):
            wanted.setdefault((*stem, *tail[:j]), []).append((n, token))
    seqs, scores = list(wanted), [0.0] * len(pairs)
    for rows, logits, *_ in prefill(model, seqs, batch_size):
        logp = logits.log_softmax(-1).cpu()                                                 # (B, V)
        for row, values in zip(rows, logp):
            for n, token in wanted[seqs[row]]:
                scores[n] += values[token].item()
    return scores


def context_of(model) -> int:
    """Tokens the model can see at once."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30


def fit_shots(tokenizer, head, shots, queries, room):
    """Prompts head + worked examples + query as ids, with as many of the examples as fit into `room` tokens for ALL
    queries -> (number of examples, id lists). Raises DoesNotFit when not even none fits."""
    for k in range(len(shots), -1, -1):
        seqs = [encode(tokenizer, head + "".join(shots[:k]) + q) for q in queries]
        longest = max(map(len, seqs))
        if longest <= room:
            return k, seqs
    raise DoesNotFit(f"prompt {longest} > context {room}")


def _scored(responses, references, score=rouge_l, **more):
    """Items of a generation metric, and their mean score x 100; columns of equal length in `more` are added."""
    items = [dict(response=r, reference=g, score=float(score(r, g)), **dict(zip(more, row)))
             for r, g, *row in zip(responses, references, *more.values())]
    return 100 * float(np.mean([item["score"] for item in items])), items


def verbmem(model, tokenizer, rows, new_tokens=128, batch_size=32, stats=None):
    """Does the model continue the forget texts word for word? rows of prompt, gt -> (mean ROUGE-L F1 x 100, items).

    As released by MUSE, the reference is the first new_tokens ids of gt INCLUDING its BOS, so one content token short.
    """
    seqs = [encode(tokenizer, row["prompt"]) for row in rows]
    longest, context = max(map(len, seqs)) + new_tokens, context_of(model)
    if longest > context:
        raise DoesNotFit(f"prompt and continuation {longest} > context {context}")
    gts = [tokenizer.decode(encode(tokenizer, row["gt"])[:new_tokens], skip_special_tokens=True) for row in rows]
    responses = generate(model, tokenizer, seqs, new_tokens, batch_size, stats=stats)
    return _scored(responses, gts, prompt=[row["prompt"] for row in rows])


def knowmem(model, tokenizer, rows, icl, new_tokens=32, batch_size=32, stats=None):
    """Can the model answer questions about the texts? rows, icl of question, answer -> (mean ROUGE-L F1 x 100, items,
    number of worked examples). The answer ends where the model starts the next question."""
    k, seqs = fit_shots(tokenizer, "", [qa_text(r["question"], r["answer"]) for r in icl],
                        [qa_text(r["question"]) for r in rows], context_of(model) - new_tokens)
    stop = ("\n\n", "\nQuestion", "Question:")
    responses = generate(model, tokenizer, seqs, new_tokens, batch_size, stop, stats)
    for s in stop:
        responses = [r.split(s)[0] for r in responses]
    return *_scored(responses, [r["answer"] for r in rows], question=[r["question"] for r in rows]), k


def privleak_scores(model, tokenizer, texts, batch_size=32) -> list[dict]:
    """Min-40 % score of each text -> [{"score", "tokens"}]. A text beyond the context is read in chunks with a BOS."""
    context = context_of(model)
    pieces = [[encode(tokenizer, "") + c for c in chunks(encode(tokenizer, t, bos=False), context - 1)] for t in texts]
    logps = iter(token_logps(model, [c for cs in pieces for c in cs], batch_size))
    joined = [torch.cat([torch.zeros(0), *(next(logps) for _ in cs)]) for cs in pieces]
    for i, logp in enumerate(joined):
        if not len(logp):
            raise BadInput(f"PrivLeak text {i + 1} ({texts[i][:20]!r}) has fewer than two tokens; remove it")
    return [dict(score=min_k_score(logp), tokens=len(logp)) for logp in joined]


def mmlu(model, tokenizer, dev, rows, style, batch_size=32, final="Question:", stats=None):
    """Four-choice accuracy x 100 -> (score, items, worked examples). style as in mmlu_text:

    "generative": one prompt for all, five dev questions spread evenly over the subjects, 4 greedy tokens, first
    character (the released five are not known to us, these are ours).
    "logprob": five dev questions of the row's own subject; arg max over the letters, each scored as a WHOLE
    continuation of the text, because " A" and "A" are different tokens and a tokenizer may merge across the border.
    """
    if style == "generative":
        spread = [dev[i * len(dev) // 5] for i in range(5)] if len(dev) > 5 else dev
        k, seqs = fit_shots(tokenizer, "", [mmlu_text(r, True) for r in spread],
                            [mmlu_text(r, False, final=final) for r in rows], context_of(model) - 4)
        responses = generate(model, tokenizer, seqs, 4, batch_size, stats=stats)
        picks, shots = [text.strip()[:1] for text in responses], {k}
    else:
        picks, shots = [None] * len(rows), set()
        for subject in dict.fromkeys(r["subject"] for r in rows):
            own = [i for i, r in enumerate(rows) if r["subject"] == subject]
            head = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
            examples = [mmlu_text(r, True, style) for r in dev if r["subject"] == subject][:5]
            letters = {i: LETTERS[:len(rows[i]["choices"])] for i in own}
            k, seqs = fit_shots(tokenizer, head, examples, [mmlu_text(rows[i], False, style) + " " + letter
                                                            for i in own for letter in letters[i]], context_of(model))
            shots.add(k)
            seqs, pairs = iter(seqs), []
            for i in own:                                    # the stem is what the options of a question share
                options = [next(seqs) for _ in letters[i]]
                same = len(os.path.commonprefix(options))
                pairs += [(s[:same], s[same:]) for s in options]
            scores = iter(continuation_logps(model, pairs, batch_size))
            for i in own:
                mine = {letter: next(scores) for letter in letters[i]}
                picks[i] = max(mine, key=mine.get)
    answers, questions = [LETTERS[r["answer"]] for r in rows], [r["question"] for r in rows]
    k = "-".join(map(str, sorted({min(shots), max(shots)})))
    return *_scored(picks, answers, operator.eq, question=questions), k


def cut_queries(bench, tokenizer, context):
    """A copy of the benchmark whose verbatim queries and PrivLeak texts, where it brings none, are cut from its texts.

    Windows of 200 + 128 tokens (half and half where the context is smaller), a text that is shorter than one is split
    in the middle; at most 100 of them, spread evenly. We cut between words: a cut word is a riddle, not memorisation.
    """
    def windows(texts, kind):
        pieces = []
        for n, text in enumerate(texts, 1):
            ids = encode(tokenizer, text, bos=False)
            if len(ids) < 2:
                raise BadInput(f"{bench.name}: {kind} text {n} ({text[:20]!r}) is shorter than two tokens; remove it")
            for a in range(0, max(1, len(ids) - size // 2), size):
                part = ids[a:a + size]
                piece = tokenizer.decode(part)
                head = tokenizer.decode(part[:prompt_tokens if len(part) == size else len(part) // 2])
                skip = piece.find(" ") + 1 if a else 0       # a later window may start inside a word
                at = max(piece.rfind(c, 0, len(head)) for c in " \n") + 1 or len(head)
                pieces.append((piece[skip:], dict(prompt=piece[skip:at].rstrip(), gt=piece[at:].strip())))
        return [pieces[i * len(pieces) // 100] for i in range(100)] if len(pieces) > 100 else pieces
    prompt_tokens, new = (200, 128) if context > 330 else (context // 2 - 2, context // 2 - 2)
    size = prompt_tokens + new
    bench = replace(bench, privleak=dict(bench.privleak))
    if not bench.verbmem:
        bench.verbmem = [q for _, q in windows(bench.forget, "forget") if q["prompt"] and q["gt"]]
        longest = max((len(encode(tokenizer, q["gt"])) for q in bench.verbmem), default=new)
        bench.verbmem_new_tokens = min(new, longest)         # what is said beyond a reference lowers F1, known or not
    if bench.holdout and not bench.privleak.get("holdout"):
        bench.privleak["holdout"] = [text for text, _ in windows(bench.holdout, "holdout")]
    if bench.privleak.get("holdout") and not bench.privleak.get("forget"):
        bench.privleak["forget"] = [text for text, _ in windows(bench.forget, "forget")]
    return bench


def start_evaluation(model, tokenizer, kind, names, known) -> dict:
    """An empty evaluation, once the names asked for are known and the tokenizer fits: one with more tokens than the
    model has embeddings would end in an index error in the middle."""
    if unknown := set(names or ()) - set(known):
        raise BadInput(f"unknown {kind} {', '.join(sorted(unknown))}: choose out of {', '.join(known)}")
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise BadInput(f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {rows} rows: they do not "
                       f"belong together; name the right one with --tokenizer")
    model.eval()
    return {"metrics": {}, "items": {}, "definitions": {}, "not_computed": {}, "near_ties": 0}


def evaluate_muse(model, tokenizer, bench, metrics=None, batch_size=32, max_rows=None, auc_retrain=None) -> dict:
    """The metrics of MUSE on a model in memory -> {"metrics", "items", "definitions", "not_computed", "near_ties"}.

    metrics: names out of METRICS, all by default. max_rows: only the first rows of each list. auc_retrain: the AUC of a
    measured retrain model; without it the benchmark's published constant, and without that PrivLeak is not computed.
    """
    out = start_evaluation(model, tokenizer, "metric", metrics, METRICS)
    bench = cut_queries(bench, tokenizer, context_of(model))
    wanted = [m for m in METRICS if metrics is None or m in metrics or (m == "auc" and "privleak" in metrics)]
    for metric in wanted:
        try:
            if metric in bench.missing:
                raise DoesNotFit(bench.missing[metric])
            if metric == "privleak":
                reference = bench.auc_retrain if auc_retrain is None else auc_retrain
                if reference is None or "auc" not in out["metrics"]:
                    raise DoesNotFit(out["not_computed"].get("auc", "needs a retrain model, or the AUC of one"))
                source = "published constant" if auc_retrain is None else "measured on the retrain model"
                out["metrics"][metric] = privleak(out["metrics"]["auc"], reference)
                out["definitions"][metric] = f"100 (AUC - {reference:.4f}) / {reference:.4f}, the reference is {source}"
                continue
            score, items, definition = measure(metric, model, tokenizer, bench, batch_size, max_rows, out)
            out["metrics"][metric], out["items"][metric], out["definitions"][metric] = score, items, definition
        except DoesNotFit as e:
            out["not_computed"][metric] = str(e)
    return out


def measure(metric, model, tokenizer, bench, batch_size, max_rows, stats):
    """One metric of METRICS but privleak -> (score, items, definition in words)."""
    if metric == "auc":
        sides = {side: privleak_scores(model, tokenizer, bench.privleak[side][:max_rows], batch_size)
                 for side in ("forget", "holdout")}
        a, b = ([item["score"] for item in items] for items in sides.values())
        return auc(a, b), sides, f"P(Min-40 % score of forget > holdout), {len(a)} and {len(b)} texts"
    if metric == "verbmem_f":
        if not bench.verbmem:
            raise DoesNotFit("no verbatim query could be cut from the forget texts")
        score, items = verbmem(model, tokenizer, bench.verbmem[:max_rows], bench.verbmem_new_tokens, batch_size, stats)
        how = f"ROUGE-L F1, greedy, {bench.verbmem_new_tokens} new tokens, {len(items)} queries"
    elif metric in ("knowmem_f", "knowmem_r"):
        side = "forget_qa" if metric == "knowmem_f" else "retain_qa"
        rows, icl = bench.knowmem[side][:max_rows], bench.knowmem.get(side + "_icl", [])
        score, items, k = knowmem(model, tokenizer, rows, icl, bench.knowmem_new_tokens, batch_size, stats)
        how = f"ROUGE-L F1, greedy, {bench.knowmem_new_tokens} new tokens, {k} worked examples, {len(items)} questions"
    else:
        style = "logprob" if metric == "mmlu_val_logprob" else "generative"
        score, items, k = mmlu(model, tokenizer, bench.mmlu.get("dev", []), bench.mmlu["validation"][:max_rows], style,
                               batch_size, bench.mmlu_final, stats)
        return score, items, f"accuracy, {style}, {k}-shot, {len(items)} questions"
    odd = sum(any(c.isalnum() and not c.isascii() for c in item["response"] + item["reference"]) for item in items)
    return score, items, how + (f"; ROUGE drops the letters beyond ASCII of {odd} items" if odd else "")


# ----- TOFU: arXiv:2401.06121; forget quality and model utility as in arXiv:2404.05868 -----
SETS = ("forget", "retain", "real_authors", "world_facts")
# What stands before an answer, and what the answer itself starts with. "plain_released": the released TOFU code counts
# "Answer: " among the answer's tokens, which flatters every probability; in "plain" it belongs to the prompt.
TEMPLATES = {"plain": ("Question: {}\nAnswer: ", ""), "plain_released": ("Question: {}\n", "Answer: "),
             "llama2": ("[INST] {} [/INST]", "")}


def pick_template(tokenizer, template="auto") -> str:
    """"auto" -> what the tokenizer's own chat template says: "llama2" or "chat", and "plain" for a base model."""
    chat = getattr(tokenizer, "chat_template", None)
    if template == "auto":
        return "plain" if not chat else "llama2" if "[/INST]" in str(chat) else "chat"
    if template not in TEMPLATES and template != "chat":
        raise BadInput(f"unknown template {template!r}: choose auto, chat, {', '.join(TEMPLATES)}")
    if template == "chat" and not chat:
        raise BadInput("template chat: this tokenizer has no chat template; use plain or llama2")
    return template


def chat_prompt(tokenizer, question) -> str:
    """The question in the tokenizer's chat template, up to where the answer starts. Llama 3's prints today's date into
    the prompt: without a fixed one a model scores otherwise tomorrow. Date and system line are open-unlearning's."""
    turns = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": question}]
    template = re.sub(r"strftime_now\([^)]*\)", "'10 Apr 2025'", tokenizer.get_chat_template())
    fixed = dict(tokenize=False, add_generation_prompt=True, date_string="10 Apr 2025", chat_template=template)
    try:
        return tokenizer.apply_chat_template(turns, **fixed)
    except Exception:                                        # Gemma's template, for one, refuses the system role
        return tokenizer.apply_chat_template(turns[1:], **fixed)


def qa_ids(tokenizer, question, answer, template="plain", max_length=None):
    """(prompt ids with one BOS, answer ids with EOS), tokenised apart, to be joined by `+`.

    Apart, because a tokenizer may merge the last character of the prompt with the first of the answer, and a mask of
    the prompt's length would be off by one. An answer that does not fit into max_length tokens is cut and loses its
    EOS, as released; a question that leaves no room for an answer is refused.
    """
    before, start = TEMPLATES.get(pick_template(tokenizer, template), ("", ""))
    prompt = encode(tokenizer, before.format(question) if before else chat_prompt(tokenizer, question))
    if tokenizer.eos_token_id is None:
        raise BadInput("the tokenizer has no EOS token, and an answer needs an end; choose another with --tokenizer")
    # SentencePiece puts a space in front of any text, and "[/INST] Yes" is not the released "[/INST]Yes". We tokenise
    # the answer behind a line break, which nothing merges with, and take that off again.
    newline, ids = encode(tokenizer, "\n", bos=False), encode(tokenizer, "\n" + start + answer, bos=False)
    ids = ids[len(newline):] if ids[:len(newline)] == newline else encode(tokenizer, start + answer, bos=False)
    ids = ids + [tokenizer.eos_token_id]
    if max_length is not None:
        if len(prompt) >= max_length:
            raise BadInput(f"the question {question[:40]!r} takes {len(prompt)} tokens and the limit is {max_length}: "
                           f"nothing of its answer is left; shorten it, or raise the limit")
        ids = ids[:max_length - len(prompt)]
    return prompt, ids


def answer_nll(model, tokenizer, pairs, template="plain", batch_size=32):
    """L(a|q) of each (question, answer): minus log p, mean over the answer's tokens, EOS included -> [(L, tokens)]."""
    joined = [qa_ids(tokenizer, q, a, template, context_of(model)) for q, a in pairs]
    logps = token_logps(model, [prompt + answer for prompt, answer in joined], batch_size)
    return [(-logp[-len(answer):].double().mean().item(), len(answer)) for logp, (_, answer) in zip(logps, joined)]


def mean_loss(model, tokenizer, docs, batch_size=32, context=1024) -> float:
    """Loss on what finetune trains on, nats a token: texts, cut into chunks of `context` tokens, or questions with
    their answers, of which only the answers count. Near 0 for texts learned by heart."""
    if isinstance(docs[0], dict):
        nlls = answer_nll(model, tokenizer, [(d["question"], d["answer"]) for d in docs], "auto", batch_size)
        return sum(nll * tokens for nll, tokens in nlls) / sum(tokens for _, tokens in nlls)
    size = min(context, context_of(model))
    logps = token_logps(model, [c for doc in docs for c in chunks(encode(tokenizer, doc), size)], batch_size)
    return -torch.cat(logps).mean().item()


def truth_ratio(nll_para, nll_pert, mean="geometric"):
    """R = mean_i p(perturbed_i) / p(paraphrase), p = exp(-nll).  nll_para (N,), nll_pert (N, K) -> (N,), a tensor for
    tensors.

    Near 1 (or above) for a model that cannot tell true from false, near 0 for one that knows. Two means live in public
    code: "arithmetic" is Eq. 16 of arXiv:2404.05868, "geometric", exp(nll_para - mean nll_pert), is in all released
    evaluation code and behind every published table. We stay in logs: exp(-800), a collapsed model's p, is 0.
    """
    para, pert = (torch.as_tensor(x, dtype=torch.float64) for x in (nll_para, nll_pert))
    if mean not in ("geometric", "arithmetic"):
        raise ValueError(f"mean {mean!r}: geometric or arithmetic")
    log_mean = -pert.mean(1) if mean == "geometric" else (-pert).logsumexp(1) - np.log(pert.shape[1])       # (N,)
    ratio = (log_mean + para).clamp(max=700).exp()           # finite, so that JSON and 1/R can hold it
    return ratio if torch.is_tensor(nll_pert) else ratio.numpy()


def forget_quality(ratios_a, ratios_b) -> float:
    """p-value of the two-sided Kolmogorov-Smirnov test between the truth ratios (N,), (N,) of two models on the same
    rows: near 1 when unlearned and retrained model cannot be told apart. Below 1e-308 it is 0, then see its log10."""
    from scipy.stats import ks_2samp
    a, b = np.asarray(ratios_a, dtype=np.float64), np.asarray(ratios_b, dtype=np.float64)
    if len(a) != len(b) or not len(a):
        raise BadInput(f"truth ratios of {len(a)} rows against {len(b)}: measure both models on the same rows, with "
                       f"the same --bench, --max-authors and --max-rows")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise BadInput("a truth ratio is not finite: one of the two models is broken; take an earlier checkpoint")
    if (a == b).all():
        warnings.warn("both models have the same truth ratio on every row, so forget quality is 1 whatever was "
                      "forgotten: is the unlearned model the retrain model?", stacklevel=2)
    return float(ks_2samp(a, b).pvalue)


def log10_forget_quality(ratios_a, ratios_b) -> float:
    """log10 of forget_quality, also where that underflows: p = 2 sum_k (-1)^(k+1) C(2n, n - k h) / C(2n, n), h = n D
    (Gnedenko and Korolyuk), and at such a p only k = 1 counts. The floor is D = 1: 2 / C(2n, n)."""
    from scipy.special import gammaln
    from scipy.stats import ks_2samp
    if (p := forget_quality(ratios_a, ratios_b)) > 0:
        return float(np.log10(p))
    n = len(ratios_a)
    h = round(n * ks_2samp(ratios_a, ratios_b, method="asymp").statistic)
    return float((np.log(2) + 2 * gammaln(n + 1) - gammaln(n - h + 1) - gammaln(n + h + 1)) / np.log(10))


def model_utility(entries) -> float:
    """Harmonic mean of probability, ROUGE and truth ratio on retain, real authors, world facts: nine numbers in 0..1.
    One zero makes it 0, the limit of the harmonic mean: a model that lost one of the nine is of no use there."""
    entries = np.asarray(list(entries), dtype=np.float64)
    return float(len(entries) / (1 / entries).sum()) if (entries > 0).all() else 0.0


def tofu_items(model, tokenizer, rows, template, batch_size, new_tokens, stats):
    """What is measured of each row: greedy response, ROUGE-L recall, NLL of the answer, of its paraphrase, of the wrong
    ones. Real authors and world facts have no paraphrase, there the answer takes its place (released). -> (items,
    new tokens: as many as asked for and as the context holds)."""
    prompts = [qa_ids(tokenizer, r["question"], r["answer"], template, context_of(model))[0] for r in rows]
    new_tokens = min(new_tokens, context_of(model) - max(map(len, prompts)))
    responses = generate(model, tokenizer, prompts, new_tokens, batch_size, stats=stats)
    texts = [[r["answer"], r.get("paraphrased_answer"), *r.get("perturbed_answer", [])] for r in rows]
    pairs = [(r["question"], text) for r, own in zip(rows, texts) for text in own if text]
    nlls = iter(answer_nll(model, tokenizer, pairs, template, batch_size))
    items = []
    for row, response, (_, para, *wrong) in zip(rows, responses, texts):
        nll, tokens = next(nlls)
        items.append(dict(question=row["question"], reference=row["answer"], response=response, nll=nll, tokens=tokens,
                          rouge=rouge_l(response, row["answer"], "recall", stemmer=True),
                          nll_para=next(nlls)[0] if para else nll, nll_pert=[next(nlls)[0] for _ in wrong]))
    return items, new_tokens


def tofu_scores(part, items) -> dict:
    """The entries of one of SETS -> {"prob", "rouge", "truth_ratio", "truth_ratio_arithmetic"}, the last two only when
    all rows have perturbed answers; each item gets its own prob and ratios R."""
    perturbed = all(item["nll_pert"] for item in items)
    means = {"truth_ratio": "geometric", "truth_ratio_arithmetic": "arithmetic"} if perturbed else {}
    for item in items:
        item["prob"] = float(np.exp(-item["nll"]))
        if perturbed and part in SETS[2:]:                   # a choice between four answers, as released
            item["prob"] = 1 / sum(float(np.exp(min(item["nll"] - x, 700))) for x in (item["nll"], *item["nll_pert"]))
        for key, mean in means.items():
            item[key] = float(truth_ratio([item["nll_para"]], [item["nll_pert"]], mean)[0])
    scores = {key: float(np.mean([item[key] for item in items])) for key in ("prob", "rouge")}
    for key in means:
        R = np.array([item[key] for item in items])                                         # (N,)
        # Forgotten means R near 1 from either side; knowing, which the other sets ask for, means R below 1
        kept = np.minimum(R, 1 / np.maximum(R, 1e-300)) if part == "forget" else np.maximum(0, 1 - R)
        scores[key] = float(np.mean(kept))
    return scores


def tofu_definitions(part, scores, items, template, new_tokens) -> dict:
    """metric -> its definition in words, for one of SETS."""
    choice = part in SETS[2:] and "truth_ratio" in scores
    said = {f"prob_{part}": f"mean {'p / (p + p of the wrong answers)' if choice else 'p'}, p = exp(-mean NLL of the "
                            f"answer's tokens and EOS), template {template}, {len(items)} rows",
            f"rouge_{part}": f"ROUGE-L recall, stemmed, greedy, up to {new_tokens} new tokens, {len(items)} rows"}
    for key in list(scores)[2:]:
        mean = "arithmetic" if key.endswith("arithmetic") else "geometric"
        kept = "min(R, 1/R)" if part == "forget" else "max(0, 1 - R)"
        said[f"{key}_{part}"] = f"mean {kept}, R = {mean} mean of p(wrong) / p({'answer' if choice else 'paraphrase'})"
    return said


def evaluate_tofu(model, tokenizer, bench, batch_size=32, max_rows=None, retrain_ratios=None, parts=None) -> dict:
    """The metrics of TOFU on a model in memory, in 0..1 but for the log -> {"metrics", "items", "definitions",
    "not_computed", "near_ties"}.

    retrain_ratios: the retrain model's truth ratios on the forget rows, numbers or, better, the "forget" items of its
    evaluation, whose questions are then compared; without it forget quality is not computed. parts: some of SETS.
    max_rows: the first rows of each set. The released code takes the first 300, we take all.
    """
    out = start_evaluation(model, tokenizer, "set", parts, SETS)
    template = pick_template(tokenizer, bench.template)
    for part in parts or SETS:
        rows = bench.tofu.get(part, [])[:max_rows]
        if not rows:
            out["not_computed"][part] = f"{bench.name} has no {part} rows"
            continue
        items, new = tofu_items(model, tokenizer, rows, template, batch_size, bench.answer_new_tokens, out)
        out["items"][part] = items
        scores = tofu_scores(part, items)
        out["metrics"].update({f"{key}_{part}": score for key, score in scores.items()})
        out["definitions"].update(tofu_definitions(part, scores, items, template, new))
        if "truth_ratio" not in scores:
            out["not_computed"][f"truth_ratio_{part}"] = f"{bench.name}: a row of {part} has no perturbed_answer"
    for mean in ("", "_arithmetic"):
        keys = [f"{key}_{part}" for part in SETS[1:] for key in ("prob", "rouge", f"truth_ratio{mean}")]
        if entries := [out["metrics"][key] for key in keys if key in out["metrics"]]:
            out["metrics"][f"model_utility{mean}"] = model_utility(entries)
            out["definitions"][f"model_utility{mean}"] = f"harmonic mean of {len(entries)} of the nine entries"
    if "forget" in (parts or SETS):
        add_forget_quality(out, retrain_ratios)
    return out


def add_forget_quality(out, retrain):
    """forget_quality, its log10 and its arithmetic twin into out, or the reason why not. retrain: see evaluate_tofu."""
    names = ("forget_quality", "log10_forget_quality", "forget_quality_arithmetic")
    items = out["items"].get("forget", [])
    if retrain is None or not items or "truth_ratio" not in items[0]:
        why = "needs a retrain model (--retrain)" if retrain is None else "needs perturbed answers on the forget rows"
        return out["not_computed"].update(dict.fromkeys(names, why))
    retrain = [r if isinstance(r, dict) else {"truth_ratio": float(r)} for r in retrain]
    for n, (a, b) in enumerate(zip(items, retrain), 1):
        if a["question"] != b.get("question", a["question"]):
            raise BadInput(f"forget row {n} is {a['question'][:40]!r} here and {b['question'][:40]!r} for the retrain "
                           f"model: measure both with the same --bench and --max-authors")
    for key in ["truth_ratio"] + ["truth_ratio_arithmetic"] * all("truth_ratio_arithmetic" in r for r in retrain):
        a, b, name = [i[key] for i in items], [r[key] for r in retrain], key.replace("truth_ratio", "forget_quality")
        out["metrics"][name] = forget_quality(a, b)
        out["definitions"][name] = f"Kolmogorov-Smirnov p-value of {key} on {len(a)} forget rows against retrain's"
        if key == "truth_ratio":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")              # forget_quality has just said it
                out["metrics"]["log10_forget_quality"] = log10_forget_quality(a, b)
            out["definitions"]["log10_forget_quality"] = "log10 of forget_quality, also below 1e-308"


# ===== runs: what every training script shares, and nothing of any unlearning step =====

def parse_config(Config, doc, argv=None):
    """Flags are the fields of the dataclass Config; their help, source and choices come from its metadata. Booleans are
    --flag / --no-flag."""
    p = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for f in fields(Config):
        kind = dict(action=argparse.BooleanOptionalAction) if f.type in (bool, "bool") else dict(type=f.type)
        if "choices" in f.metadata:
            kind["choices"] = f.metadata["choices"]
        shown = f.metadata["help"] + ("" if f.default in (None, "", False) else f" (default {f.default})")
        p.add_argument("--" + f.name.replace("_", "-"), default=f.default, help=shown.replace("%", "%%"), **kind)
    return Config(**vars(p.parse_args(argv)))


def pick_device(name) -> str:
    """"auto" -> cuda, mps or cpu. On CUDA float32 matmuls run in TF32, as the authors ran."""
    torch.set_float32_matmul_precision("high")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as e:
        why = str(e).splitlines()[0][:80]
        raise BadInput(f"--device {name}: this torch cannot use it ({why}); use --device cpu") from e
    return name


def flags_of(cfg) -> dict:
    """The flags that decide a run's numbers: what --resume compares, and what a checkpoint belongs to."""
    return {k: v for k, v in asdict(cfg).items() if k not in ("out", "resume")}


def run_folder(cfg, name) -> Path:
    """The folder of a run: new, or, with --resume, the newest one of that name (or --out), if the same flags made it.

    Its flags.json is what --resume compares: a changed flag is refused by name, or the bits would be those of no run.
    """
    stem = f"runs/{Path(cfg.bench).name}-{name}"
    free = next(k for k in range(10 ** 6) if not Path(f"{stem}-{k}").exists())
    folder = Path(cfg.out or f"{stem}-{max(0, free - 1) if cfg.resume else free}")
    flags, file = json.loads(redact(json.dumps(flags_of(cfg)))), folder / "flags.json"
    must_write(file, "name a folder that can be written by --out")
    if cfg.resume and file.exists():
        old = json.loads(read_text(file))
        for k in sorted(old.keys() | flags.keys()):
            if old.get(k) != flags.get(k):
                raise BadInput(f"--resume {folder}: --{k.replace('_', '-')} was {old.get(k)!r} and is {flags.get(k)!r} "
                               f"now; give the same flags, or start anew without --resume")
    elif (folder / "config.json").exists():
        raise BadInput(f"{folder} holds a run already: go on with it by --resume, or name another folder by --out")
    if not folder.exists():
        OPENED.append(folder)
    write_json(file, flags)
    for place in (folder, *folder.glob("*/"), *folder.glob("*/*/")):         # seed0/request1: the run is ours alone
        sweep(place, seconds=0)
    return folder


def empty_model(path, bench=""):
    """The model of a folder or hub id without weights (on the meta device), to count what it would take. Where there
    is no path it is an embedded benchmark's own, else Llama-2-7B; that stands for the hub ids of MUSE and TOFU too, so
    that their plan needs no hub."""
    import torch.nn.attention.flex_attention  # noqa: F401  transformers would, under "meta", where torch 2.6 cannot
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
    if not path and bench in EMBEDDED:
        return mini_model(1024, 0)
    known = not path or str(path).startswith(("muse-bench/", "locuslab/", TOFU_LLAMA)) and not Path(path).exists()
    config = LlamaConfig() if known else _load(AutoConfig, base_of(path), "target")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as e:
        raise BadInput(f"{path}: no causal language model ({type(e).__name__}); name another by --target") from e


def parameters_of(lm, lora=0, trainable="all") -> int:
    """How many numbers are trained: every weight, the matrices of attention and MLP, or adapters of rank `lora`."""
    others = {id(p) for m in lm.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    others.add(id(lm.get_output_embeddings().weight))
    matrices = [p for p in lm.parameters() if p.ndim == 2 and id(p) not in others]
    return (sum(lora * sum(p.shape) for p in matrices) if lora
            else sum(p.numel() for p in (matrices if trainable == "matrices" else lm.parameters())))


def layer_and_head_bytes(config, tokens, width, lora, norms, device):
    """What a Llama-like decoder layer keeps for its backward pass, and what the head takes -> two numbers of bytes.

    Layer: its inputs, norms, queries and attention, 6 D a token, keys and values, and 4 I in the MLP; 2 D more where
    the norms are trained. Beside a bfloat16 base each adapter keeps a float32 cast of its input. Head: two chunks of
    logits and five blocks, or, larger in wide layers, what a layer's backward pass holds at once.
    """
    D = config.hidden_size
    I = getattr(config, "intermediate_size", 4 * D)   # GPT-2 does not say
    kv = getattr(config, "num_key_value_heads", config.num_attention_heads) / config.num_attention_heads
    casts = 4 * (6 * D + I) if lora and width == 2 else 0
    head = 4 * (2 * 2 ** 26 + 5 * 2 ** 24 if device.startswith("cuda") else 2 * 2 ** 24 + 5 * 2 ** 19)
    return tokens * (((6 + 2 * kv + 2 * norms) * D + 4 * I) * width + casts), max(head, 3 * 4 * tokens * I)


def check_memory(plan, cfg, remedy):
    """Print a plan (part -> GB) for --dry-run; stop a run that a CUDA card cannot hold, before anything is loaded."""
    need = sum(plan.values())
    if cfg.dry_run:
        print("\n".join(f"{k:26s}{v:8.2f} GB" for k, v in plan.items()) + f"\n{'peak':26s}{need:8.2f} GB")
    elif cfg.device.startswith("cuda") and need > (free := torch.cuda.mem_get_info(cfg.device)[0] / 1e9):
        raise BadInput(f"this run needs about {need:.0f} GB, the card has {free:.0f} GB free: use --lora 16, or "
                       f"{remedy}")


class Log:
    """log.jsonl of one seed: a line per step and per evaluation. Step numbers stay on the device until flush(), so that
    no step waits for the host."""

    def __init__(self, folder, seed, step):
        """Lines from `step` on are dropped: a resumed run writes each line once."""
        self.path, self.seed, self.pending, self.start = folder / "log.jsonl", seed, [], time.time()
        lines = self.path.read_text().splitlines() if self.path.exists() and step else []
        kept = beside(self.path)                             # a kill in here must not cost the lines so far
        kept.write_text("".join(s + "\n" for s in lines if (try_json(s) or {}).get("step", step) < step))
        os.replace(kept, self.path)

    def step(self, step, **numbers):
        self.pending.append(dict(kind="step", step=step, seed=self.seed, **numbers, seconds=time.time() - self.start))

    def flush(self):
        """Write the pending lines. A NaN or infinity stops the run here, before any checkpoint, and names its step."""
        with self.path.open("a") as f:
            for row in self.pending:
                row = {k: v.item() if torch.is_tensor(v) else v for k, v in row.items()}
                bad = [k for k, v in row.items() if isinstance(v, float) and not np.isfinite(v)]
                if bad:
                    raise BadInput(f"{bad[0]} is {row[bad[0]]} at step {row['step']}: lower the learning rate; the "
                                   f"last good state, if an epoch was finished, is in {self.path.parent}")
                f.write(json.dumps(row) + "\n")
        self.pending = []

    def evaluation(self, step, epoch, metrics):
        with self.path.open("a") as f:
            f.write(json.dumps(dict(kind="eval", step=step, epoch=epoch, seed=self.seed, metrics=metrics)) + "\n")
        shown = "".join(f"  {k} {v:7.3f}" for k, v in metrics.items())
        seconds = time.time() - self.start
        print(f"seed {self.seed}  epoch {epoch:3d}  step {step:5d}{shown}  {seconds:7.1f} s", flush=True)


def print_examples(n, items):
    """Table 2: the same prompts, answered by target, unlearned and retrain.  items: name -> evaluation items."""
    for metric in ("verbmem_f", "knowmem_f"):
        for k in range(min(n, *(len(i.get(metric, [])) for i in items.values()))):
            row = items["unlearned"][metric][k]
            print(f"\n{metric} {k}: {(row.get('prompt') or row.get('question'))[-200:]!r}")
            print(f"  {'reference':10s}{items['unlearned'][metric][k]['reference']!r}")
            for name in items:
                print(f"  {name:10s}{items[name][metric][k]['response']!r}")


def cached_evaluation(path, bench, tokenizer="", metrics=None, batch_size=32, max_rows=None, auc_retrain=None,
                      dtype=torch.float32, device="cpu", retrain_ratios=None) -> dict:
    """evaluate_muse (or evaluate_tofu) of a model on disk, kept in the cache: target and retrain are measured once, not
    once a run. The key is everything the numbers depend on: weights, tokenizer, benchmark, settings and this file. A
    hub id stands for its weights."""
    import transformers
    settings = [metrics and sorted(metrics), batch_size, max_rows, auc_retrain, str(dtype), str(device), retrain_ratios]
    data = {k: v for k, v in asdict(bench).items() if k not in ("models", "train")}
    key = sha256([fingerprint(path), fingerprint(tokenizer or path), data, settings, sha256(Path(__file__)),
                  torch.__version__, transformers.__version__])
    file = cache_dir() / "evaluations" / f"{key[:32]}.json"
    if file.is_file():
        return json.loads(file.read_text(encoding="utf8"))
    tokenizer = load_tokenizer(tokenizer or path)            # first: it is what is missing most often
    model = load_model(path, dtype, device)
    if bench.tofu:
        out = evaluate_tofu(model, tokenizer, bench, batch_size, max_rows, retrain_ratios)
    else:
        out = evaluate_muse(model, tokenizer, bench, metrics, batch_size, max_rows, auc_retrain)
    write_json(file, out)
    return out


@torch.no_grad()
def round_weights_(model, kind):
    """Round the matrices of a model in place, as a deployment would: does forgetting survive it? kind "bf16"
    (embeddings too), or "int8" / "int4": absmax per output channel, w ~ scale * round(w / scale) with scale = max |row|
    / (2^(bits-1) - 1). The integer kinds leave embeddings and head alone, as common 4- and 8-bit loaders do."""
    if kind not in ("bf16", "int8", "int4"):
        raise BadInput(f"rounding {kind!r}: choose bf16, int8 or int4")
    embeddings = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None}
    for p in model.parameters():
        if p.ndim != 2:
            continue                                         # norms and biases are a few thousand numbers
        if kind == "bf16":
            p.copy_(p.to(torch.bfloat16))
        elif id(p) not in embeddings:
            top = 2 ** (int(kind[3:]) - 1) - 1
            scale = p.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny) / top      # (out, 1)
            p.copy_((p / scale).round().clamp(-top, top) * scale)
    return model


def after_rounding(folder, device, measure) -> dict:
    """Forgetting that rounding undoes is not forgetting: the saved model at coarser weights.  measure: model ->
    evaluation; -> {"bf16", "int8", "int4"}: metrics."""
    return {kind: measure(round_weights_(load_model(folder, torch.float32, device), kind))["metrics"]
            for kind in ("bf16", "int8", "int4")}


def run_result(config, rows, target, retrain) -> dict:
    """What result.json holds.  rows: one dict a seed (steps, seconds, metrics, ...); target, retrain: evaluations,
    retrain may be None. `unlearned` is the mean over the seeds of each metric that all of them have."""
    keys = [k for k in rows[0]["metrics"] if all(r["metrics"].get(k) is not None for r in rows)]
    return dict(config=config, steps=rows[0]["steps"], seconds=sum(r["seconds"] for r in rows),
                target=target["metrics"], retrain=retrain["metrics"] if retrain else None,
                unlearned={k: float(np.mean([r["metrics"][k] for r in rows])) for k in keys},
                not_computed=rows[0]["not_computed"],
                seeds=[{k: v for k, v in r.items() if k not in ("items", "definitions")} for r in rows])


def provenance(bench, paths=None) -> dict:
    """What a run needs to be repeated. paths: role -> model or tokenizer folder (hub ids are kept as they are)."""
    import transformers
    data = {k: v for k, v in asdict(bench).items() if k not in ("models", "missing")}
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "numpy": np.__version__, "platform": platform.platform(), "threads": torch.get_num_threads(),
            "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None, "sha256": {
                "data": sha256(data), "evaluate.py": sha256(Path(__file__)),
                **{k: fingerprint(p) for k, p in (paths or {}).items()}}}


# ===== room 3: report =====
COLUMNS = {"verbmem_f": "verbmem_f", "knowmem_f": "knowmem_f", "knowmem_r": "knowmem_r", "privleak": "PrivLeak",
           "mmlu_val": "mmlu (gen.)", "mmlu_val_logprob": "mmlu (logprob)", "forget_quality": "forget quality",
           "log10_forget_quality": "log10 of it", "model_utility": "model utility", "truth_ratio_forget": "truth ratio",
           "peak_forget_quality": "best forget quality", "peak_model_utility": "utility then", "peak_epoch": "at epoch",
           "steps": "steps"}
PERCENT = ("steps", "peak_epoch", "verbmem_f", "knowmem_f", "knowmem_r", "privleak", "mmlu_val",
           "mmlu_val_logprob")                               # shown with one digit; the others lie in 0..1
# Table 1 of arXiv:2504.13388 as printed, mean (std) of 3 seeds on Llama-2-7B, in the order of the first five columns
PUBLISHED = {"news": {
    "target": "56.3|64.2|55.2|-99.8|40.0", "retrain": "21.8|33.1|55.0|0|-",
    "MT+NLUL+KL": "14.8 (2.3)|58.2 (0.5)|52.7 (0.9)|-38.8|39.0 (0.5)",
    "MT+NLUL+QKL": "8.4 (0.7)|40.0 (6.2)|50.8 (0.5)|-6.9|31.0 (4.3)",
    "MT+NLUL+QKL-star": "8.5 (0.9)|24.8 (3.1)|51.3 (0.2)|25.0|19.5 (0.6)",
    "AdamW+NPO+KL": "0.0|51.1 (1.3)|50.1 (0.9)|89.0|39.1 (0.8)", "AdamW+L+KL": "0.0|51.2 (1.2)|50.7 (0.5)|91.9|38.0",
    "AdamW+IT+KL": "21.3 (0.2)|64.4 (0.1)|52.7 (0.2)|-99.5|40.5 (0.1)",
    "AdamW+NLUL+KL": "2.9 (0.7)|58.4 (0.3)|49.9 (0.9)|94.2|39.6 (0.2)"}, "books": {
    "target": "99.8|59.4|66.9|-57.5|26.3", "retrain": "14.3|28.9|74.5|0|-",
    "MT+NLUL+KL": "1.5 (0.3)|22.0 (3.8)|59.1 (0.7)|-35.9|26.6 (0.2)",
    "MT+NLUL+QKL": "8.8 (1.0)|17.5 (1.5)|43.0 (3.2)|-57.7|25.6 (0.1)",
    "AdamW+NPO+KL": "0.0|17.7 (6.8)|37.2 (5.3)|-24.1|25.8 (0.4)"}}
EVOLUTION = {"log10_forget_quality": "log10 of forget quality", "model_utility": "model utility",
             "kl_forget": "KL(start || current) on forget answers, nats a token",
             "kl_retain": "KL(start || current) on retain answers, nats a token"}
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe and Ito


def load_runs(paths) -> list[dict]:
    """Run folders, or result.json files -> their results, each with "logs": the lines of every log.jsonl below it. A
    folder without a result (a run still under way) is named and left out."""
    runs = []
    for path in map(Path, paths):
        file = path / "result.json" if path.is_dir() else path
        run = try_json(read_text(file)) if file.is_file() else None
        if not isinstance(run, dict) or not run.get("seeds") or "bench" not in run.get("config", ()):
            print(f"left out: {path} holds no result of a finished run", file=sys.stderr)
            continue
        logs = map(read_text, sorted(path.rglob("log.jsonl")))
        run["logs"] = [[row for s in log.splitlines() if (row := try_json(s))] for log in logs]
        runs.append(run)
    if not runs:
        raise BadInput("report: no finished run among the folders given; a run prints its folder in its last line")
    return runs


def peak(seed) -> dict:
    """Where along its run a seed had its best forget quality: the point that Figure 5 of arXiv:2404.05868 shows."""
    seen = [e for e in seed.get("evolution") or () if e["metrics"].get("log10_forget_quality") is not None]
    if not seen:
        return {}
    best = max(seen, key=lambda e: e["metrics"]["log10_forget_quality"])
    return {"peak_epoch": best["epoch"],
            **{f"peak_{key}": best["metrics"][key] for key in ("forget_quality", "model_utility")}}


def run_rows(run):
    """The rows that one run adds to a table -> (label, [metrics of each seed])."""
    name, seeds = run["config"].get("name", "?"), run["seeds"]
    yield name, [dict(s["metrics"], steps=s.get("steps"), **peak(s)) for s in seeds]
    for k in range(max(len(s.get("sustain") or ()) for s in seeds)):
        yield f"{name}, request {k + 1}", [s["sustain"][k]["metrics"] for s in seeds]
    if all(s.get("relearn") for s in seeds):
        yield f"{name}, relearned", [s["relearn"] for s in seeds]
    for kind in seeds[0].get("survive") or ():
        yield f"{name}, {kind} weights", [s["survive"][kind] for s in seeds]


def cell(values, percent=True) -> str:
    """mean (std, n) of one metric over seeds; std with n - 1; "-" when nothing was computed."""
    values, digits = [v for v in values if v is not None], 1 if percent else 3
    std = f" ({np.std(values, ddof=1):.{digits}f}, {len(values)})" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{std}" if values else "-"


def tables(runs) -> str:
    """Markdown: a table for each benchmark, target and retrain first; the published row stands under a method's own."""
    out = []
    for bench in dict.fromkeys(run["config"]["bench"] for run in runs):
        own, rows, notes = [r for r in runs if r["config"]["bench"] == bench], {}, {}
        for run in own:
            for model in ("target", "retrain"):
                if run.get(model):
                    rows.setdefault(model, [run[model]])
            for label, metrics in run_rows(run):             # runs of one name are one row: their seeds are pooled
                rows.setdefault(label, []).extend(metrics)
            notes.update(run.get("not_computed") or {})
        rows = dict(sorted(rows.items(), key=lambda row: "," in row[0]))     # methods first
        columns = [c for c in COLUMNS if any(m.get(c) is not None for ms in rows.values() for m in ms)]
        out += [f"**{bench}**, mean (std, n) over seeds", "", "| | " + " | ".join(COLUMNS[c] for c in columns) + " |",
                "|---" * (len(columns) + 1) + "|"]
        published = next((PUBLISHED[k] for k in PUBLISHED if k in Path(bench).name and "verbmem_f" in columns), {})
        for label, metrics in rows.items():
            cells = (cell([m.get(c) for m in metrics], c in PERCENT) for c in columns)
            out.append(f"| {label} | " + " | ".join(cells) + " |")
            if label in published:
                printed = dict(zip(COLUMNS, published[label].split("|")))
                out.append("| *published, 7B* | " + " | ".join(f"*{printed.get(c, '-')}*" for c in columns) + " |")
        out += ["", *(f"{metric} not computed: {why}" for metric, why in notes.items()), ""]
    return "\n".join(out)


def _axes(xlabel, ylabel, title):
    from matplotlib.figure import Figure                     # no pyplot: no window system, no global state
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_title(title, loc="left", fontsize=10)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return figure, axes


def _label_ends(axes, ends):
    """Write each name at the right edge, at the height of its line, moved apart where they would overlap.
    ends: [(x, y, name, colour)] in data coordinates."""
    axes.autoscale_view()                                    # or the transform is that of an empty picture
    to_axes, gap, height = axes.transData + axes.transAxes.inverted(), 0.055, -1.0
    ends = sorted((to_axes.transform((x, y))[1], name, colour) for x, y, name, colour in ends)
    for i, (wish, name, colour) in enumerate(ends):
        height = min(max(wish, height + gap), 1 - gap * (len(ends) - 1 - i))
        axes.annotate(name, (1.01, height), xycoords="axes fraction", color=colour, va="center", fontsize=8)


def line_figure(curves, path, xlabel, ylabel, title, log=False):
    """curves: [(name, x, y)]; curves of one name share a colour and one label. Nothing is drawn without curves."""
    if not curves:
        return
    figure, axes = _axes(xlabel, ylabel, title)
    names, ends = list(dict.fromkeys(name for name, *_ in curves)), {}
    for name, x, y in curves:
        colour = COLOURS[names.index(name) % len(COLOURS)]
        axes.plot(x, y, color=colour, lw=1.4, alpha=0.4 if name in ends else 0.9, marker="o" if len(x) < 9 else "")
        ends.setdefault(name, (x[-1], y[-1], name, colour))
    axes.set_yscale("log" if log else "linear")
    _label_ends(axes, ends.values())
    figure.savefig(path, dpi=150)


def dual_scale(p):
    """Forget quality p -> axis position, as in the NPO paper's figures: linear above 0.05 (at 0), logarithmic below."""
    return np.where(p >= 0.05, (p - 0.05) * 4, np.log10(np.maximum(p, 1e-300) / 0.05))


def scatter_figure(runs, path):
    """Utility against what is left of the memory, a point a seed; target and retrain are the crosses. MUSE: the end of
    a run (Figure 3 of arXiv:2504.13388); TOFU: its best forget quality (Figure 5 of arXiv:2404.05868)."""
    tofu, points = "model_utility" in runs[0]["seeds"][0]["metrics"], {}
    x, y = ("forget_quality", "model_utility") if tofu else ("verbmem_f", "knowmem_r")
    for run in runs:
        ends = [{k.removeprefix("peak_"): v for k, v in {**s["metrics"], **peak(s)}.items()} for s in run["seeds"]]
        points.setdefault(run["config"].get("name", "?"), []).extend(ends)
        points.update({model: [run[model]] for model in ("target", "retrain") if run.get(model)})
    points = {name: xy for name, ms in points.items()
              if (xy := [(dual_scale(m[x]) if tofu else m[x], m[y]) for m in ms if None not in (m.get(x), m.get(y))])}
    if not points:
        return
    figure, axes = _axes("best forget quality along the run" if tofu else COLUMNS[x], COLUMNS[y],
                         "Model utility against forget quality" if tofu else "Figure 3: utility against memorisation")
    ends = []
    for i, (name, xy) in enumerate(sorted(points.items(), key=lambda p: p[0] in ("target", "retrain"))):
        reference = name in ("target", "retrain")
        colour = "#777777" if reference else COLOURS[i % len(COLOURS)]
        axes.scatter(*zip(*xy), color=colour, marker="X" if reference else "os^Dv"[i % 5], s=45)
        mark = "X" if reference else "\u25cf\u25a0\u25b2\u25c6\u25bc"[i % 5]
        ends.append((*np.mean(xy, axis=0), f"{name} {mark}", colour))
    if tofu:
        ticks = [p for p in (1e-20, 1e-12, 1e-8, 1e-4, 0.05, 0.5, 1) if dual_scale(p) >= axes.get_xlim()[0]]
        axes.set_xticks([dual_scale(p) for p in ticks], [f"{p:g}" for p in ticks])
        axes.axvline(0, color="#aaaaaa", ls=":", lw=1)
    _label_ends(axes, ends)
    figure.savefig(path, dpi=150)


def figures(runs, out):
    """Figures 1 to 4 of arXiv:2504.13388 and 2, 6 and 9 of arXiv:2404.05868 as PNG into the folder out, those that the
    runs have numbers for."""
    def draw(file, xlabel, ylabel, title, points, log=False):
        """points: run -> a list of (x, y) a curve; empty ones are left out."""
        lines = [(run["config"].get("name", "?"), *zip(*xy)) for run in runs for xy in points(run) if xy]
        line_figure(lines, out / f"{file}.png", xlabel, ylabel, title, log)

    def utility(run):
        start = (run.get("target") or {}).get("knowmem_r")
        return [list(enumerate([start, *(r["metrics"].get("knowmem_r") for r in s["sustain"])]))
                for s in run["seeds"] if s.get("sustain") and start is not None]
    for number, key, label, log in ((1, "nll_forget", "NLL of the forget batch, nats per token", False),
                                    (2, "grad_norm", "gradient norm before clipping", True)):
        draw(f"figure{number}", "step", label, f"Figure {number}: {label.split(',')[0]}", lambda run: [
            [(s["step"], s[key]) for s in lines if s["kind"] == "step" and s.get(key) is not None]
            for lines in run["logs"]], log)
    scatter_figure(runs, out / "figure3.png")
    draw("figure4", "requests so far", "knowmem_r", "Figure 4: utility over requests", utility)
    for key, label in EVOLUTION.items():
        draw(f"evolution_{key}", "epoch", label, label, lambda run: [
            [(e["epoch"], e["metrics"][key]) for e in s.get("evolution") or () if e["metrics"].get(key) is not None]
            for s in run["seeds"]])


def report(folders, out=None) -> str:
    """The runs' tables as markdown; with a folder `out` they are written there as table.md, with the figures."""
    runs = load_runs(folders)
    text = tables(runs)
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "table.md").write_text(text, encoding="utf8")
        figures(runs, Path(out))
    return text


def write_readme(readme="README.md", results="results"):
    """Rewrite what stands between <!-- begin: NAME --> and <!-- end: NAME --> from results/tables/NAME.md, which
    tests/make_tables.py makes of the results' JSON: no number is typed."""
    def fill(match):
        table = Path(results) / "tables" / f"{match[1]}.md"
        if not table.is_file():
            raise BadInput(f"{readme}: block {match[1]!r} has no {table}; make it by python tests/make_tables.py")
        return f"<!-- begin: {match[1]} -->\n{read_text(table).strip()}\n<!-- end: {match[1]} -->"
    text = re.sub(r"<!-- begin: (\w+) -->.*?<!-- end: \1 -->", fill, read_text(readme), flags=re.S)
    Path(readme).write_text(text, encoding="utf8")


# ===== main =====

def evaluate_main(argv):
    """evaluate.py --bench B --model M: measure one model."""
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bench", default="mini_news", help="benchmark name or folder")
    p.add_argument("--model", default="", help="model folder or hub id (default: the benchmark's target)")
    for flag, text in (("retrain", "the model that never saw the forget texts: PrivLeak's reference"),
                       ("tokenizer", "tokenizer folder or hub id (default: the model's own, or the benchmark's)"),
                       ("data-dir", "local copy of a hub benchmark"), ("out", "write the JSON to this file")):
        p.add_argument(f"--{flag}", default="", help=text)
    p.add_argument("--batch-size", type=int, default=32, help="rows at once; on a CPU scores do not depend on it")
    p.add_argument("--max-rows", type=int, default=None, help="only the first rows of every list (default: all)")
    p.add_argument("--max-authors", type=int, default=None, help="TOFU: keep so many authors (default: all 200)")
    p.add_argument("--device", default="auto", help="auto, cpu, cuda, mps")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of the weights")
    p.add_argument("--forget-split", default="train", choices=("train", "raw"), help="News: 3,554 or 889 rows")
    a = p.parse_args(argv)
    if a.batch_size < 1 or (a.max_rows is not None and a.max_rows < 1):
        raise BadInput("--batch-size and --max-rows must be 1 or more")
    if a.out:
        must_write(a.out, "name a file that can be written by --out")
    bench = load_bench(a.bench, a.data_dir, a.forget_split, a.max_authors)
    models = resolve_models(bench, target=a.model, retrain=a.retrain, tokenizer=a.tokenizer)
    if "target" not in models:
        raise BadInput(f"name the model to measure by --model: {a.bench} knows none")
    settings = dict(batch_size=a.batch_size, max_rows=a.max_rows, dtype=getattr(torch, a.dtype),
                    device=pick_device(a.device))
    if a.retrain or (a.bench not in MUSE and models.get("retrain")):     # the hub's have a published AUC
        retrain = cached_evaluation(models["retrain"], bench, models["tokenizer"], **settings,
                                    metrics=None if bench.tofu else ("auc",))
        settings |= dict(retrain_ratios=retrain["items"].get("forget"), auc_retrain=retrain["metrics"].get("auc"))
    out = cached_evaluation(models["target"], bench, models["tokenizer"], **settings)
    for metric, value in out["metrics"].items():
        print(f"{metric:34s}{np.nan if value is None else value:10.4g}   {out['definitions'][metric]}")
    for metric, why in out["not_computed"].items():
        print(f"{metric:34s}  not computed: {why}")
    print(f"near ties (two best logits within {NEAR_TIE}, where a batch size may change the text): {out['near_ties']}")
    if a.out:
        write_json(a.out, {**out, "model": models["target"], "bench": a.bench,
                           "provenance": provenance(bench, {k: models[k] for k in ("target", "tokenizer")})})


PREPARE_HELP = dict(
    base="model to start from: folder, hub id, or tiny for a fresh small one, with --lr 3e-3 --epochs 20 at least "
         "(embedded benchmarks make their own)",
    out="folder for the models (default: BENCH/models)", tokenizer="where the base has none",
    lr="peak learning rate; 1e-5 is for 7B, 3e-3 for a model of 260k",
    epochs="passes over the texts; small models learn by heart in 40", batch_size="chunks a step",
    seed="of the order of the texts", device="cpu, cuda, mps, auto")


def prepare_main(argv):
    """evaluate.py prepare --bench B --base MODEL --out DIR: the flags are prepare's arguments."""
    p = Parser(prog="evaluate.py prepare", formatter_class=argparse.ArgumentDefaultsHelpFormatter,
               description="Fine-tunes target (all texts) and retrain (without the forget texts) from a base model.")
    p.add_argument("--bench", default="mini_news", help="benchmark name or folder")
    p.add_argument("--data-dir", default="", help="local copy of a hub benchmark")
    p.add_argument("--max-authors", type=int, default=None, help="TOFU: keep so many authors (default: all 200)")
    for a in list(inspect.signature(prepare).parameters.values())[1:]:
        p.add_argument("--" + a.name.replace("_", "-"), type=type(a.default), default=a.default,
                       help=PREPARE_HELP[a.name])
    given = vars(p.parse_args(argv))
    bench = load_bench(given.pop("bench"), given.pop("data_dir"), max_authors=given.pop("max_authors"))
    made = prepare(bench, **given)
    for role, path in made.items():
        print(f"{role}: {path}")
    docs, loss = bench.forget_qa or bench.forget, {}
    for part in ("target", "retrain"):
        loss[part] = mean_loss(load_model(made[part], device=pick_device(given["device"])),
                               load_tokenizer(made["tokenizer"]), docs, given["batch_size"], bench.context)
    print("loss on the forget texts, nats a token: " + ", ".join(f"{part} {x:.2f}" for part, x in loss.items()))
    if loss["target"] > loss["retrain"] / 2:                 # [ours] what is known by heart costs far less
        print("the target has learned little by heart, so there is little to forget: raise --epochs or --lr")


def report_main(argv):
    """evaluate.py report runs/... [--out DIR] [--readme]"""
    p = Parser(prog="evaluate.py report", description="Tables and figures of finished runs.")
    p.add_argument("runs", nargs="*", help="run folders")
    p.add_argument("--out", default="runs/report", help="folder for table.md and the figures")
    p.add_argument("--readme", action="store_true", help="rewrite the generated blocks of README.md from results/")
    a = p.parse_args(argv)
    if a.readme:
        return write_readme()
    print(report(a.runs, a.out))
    print(f"report: {a.out}")


def main():
    command = {"prepare": prepare_main, "report": report_main}.get(sys.argv[1] if len(sys.argv) > 1 else "")
    command(sys.argv[2:]) if command else evaluate_main(sys.argv[1:])


if __name__ == "__main__":
    run_main(main)
