"""
Text -> binary token shards, data/<name>/train_000000.bin, ..., val_000000.bin, ... and, last of
all, meta.json. train.py reads them by read_meta and Tokens, below.

    python prepare_data.py stdlib                     # Python's own source, as bytes: no network
    python prepare_data.py fineweb-edu --tokens 400M  # the paper's schedule uses 377M GPT-2 tokens
    python prepare_data.py my/*.txt --name mine       # text in UTF-8, folders of it, .jsonl (its
                                                      # field "text"), and .xz or .gz of these

A shard is raw little-endian uint16 token ids, each document after its end-of-text token. Documents
0, 50, 100, ... are held out for validation. Where that is one document, longer than all the others
together, it is the last tenth of the tokens instead: one small file gives both splits. Killed at
any moment, the same command goes on, and the shards come out as if it had never stopped.
"""
import argparse, gzip, json, lzma, os, platform, re, signal, sys, sysconfig, time, zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
import requests, tiktoken, urllib3
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

VAL_EVERY = 50      # a document's number alone decides its split: fetching more never moves one
PIECE = 64 * 1024   # a longer text file is cut into documents of so many characters
SAVE_EVERY = 2.0    # seconds between saves: what a kill costs (all, while undecided, below)
ROWS, IN_FLIGHT = 100, 8  # rows a request (the API's limit; tokenised at once), requests at a time
TRIES, FIRST_WAIT, LONGEST_WAIT = 10, 1.0, 60  # waits 1, 2, 4, ... seconds: some 4 minutes in all
FINEWEB = {"dataset": "HuggingFaceFW/fineweb-edu", "config": "sample-10BT", "split": "train"}
ENDINGS = (".txt", ".md", ".py", ".jsonl", ".xz", ".gz")
COUNTS = ("position", "documents", "train_tokens", "val_tokens")
NO_NETWORK = ("Without network: stdlib, or your own files with --tokenizer bytes, or, for gpt2, "
              "TIKTOKEN_CACHE_DIR set to a copy of the cache of a machine that has it.")
RESUME = "The same command (without --overwrite) resumes."
AGAIN = "make these data again: prepare_data.py with --overwrite"
ANEW = "add --overwrite, or choose another --name"

def get_tokenizer(name):
    """The tiktoken.Encoding "gpt2" (50,257 tokens, downloaded once) or "bytes" (256 + 1)."""
    if name == "bytes":
        return tiktoken.Encoding("bytes", pat_str="(?s:.)", explicit_n_vocab=257,
                                 mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|endoftext|>": 256})
    try:
        return tiktoken.get_encoding(name)
    except Exception as e:  # having no network shows up as any of a dozen kinds
        raise SystemExit(f"error: no tokenizer {name} ({type(e).__name__}). {NO_NETWORK}")

# --- Sources: generators of texts -----------------------------------------------------------------

def files_below(folder, endings, skip=()):
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        found += [Path(here, name) for name in names if name.endswith(endings)]
    return sorted(found, key=Path.as_posix)

def read_file(path, longest):
    """The "text" of each line of a .jsonl file; other text in whole lines, up to `longest` long."""
    open_it = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    jsonl, piece = path.name.endswith((".jsonl", ".jsonl.xz", ".jsonl.gz")), ""
    with open_it(path, "rb") as file:
        try:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not jsonl:
                    for start in range(0, len(text), longest):  # a line may be longer
                        part = text[start:start + longest]
                        if len(piece) + len(part) > longest:
                            yield piece
                            piece = ""
                        piece += part
                elif not text.isspace():
                    yield json.loads(text)["text"] + ""  # a TypeError if it is no string
        except UnicodeDecodeError as e:  # e.object: the line, less a byte order mark
            at = file.tell() - len(e.object) + e.start
            utf16 = e.object.startswith((b"\xff\xfe", b"\xfe\xff"))
            raise SystemExit(f"error: {path} is not UTF-8 (byte {at}): iconv -f "
                             f"{'UTF-16' if utf16 else 'ITS-ENCODING'} -t UTF-8")
        except (ValueError, LookupError, TypeError, RecursionError):
            raise SystemExit(f'error: {path}, line {number}: no JSON object with a string "text"')
        except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as e:
            raise SystemExit(f"error: {path} is damaged: {e}")
    if piece:
        yield piece

def fetch_rows(url, timeout, start):
    """FineWeb-Edu from row `start` on by the dataset viewer's rows API."""
    session = requests.Session()
    if os.environ.get("HF_TOKEN"):
        session.headers["Authorization"] = "Bearer " + os.environ["HF_TOKEN"]

    def ask(first, tries=TRIES):
        """(Texts of the rows first, first + 1, ..., number of rows that there are)."""
        for i in range(tries):
            wait, hint = min(LONGEST_WAIT, FIRST_WAIT * 2 ** i), RESUME
            try:
                answer = session.get(url, params={**FINEWEB, "offset": first, "length": ROWS},
                                     timeout=(min(10, timeout), timeout))
                answer.raise_for_status()
                body = answer.json()
                rows, there = body["rows"], body["num_rows_total"]
                if [row["row_idx"] for row in rows] != list(range(first, min(first + ROWS, there))):
                    raise LookupError("other rows than asked for")
                # A text that the API has cut short is not the document: "" has it skipped.
                return ["" if "text" in row["truncated_cells"] else row["row"]["text"] + ""
                        for row in rows], there
            except requests.HTTPError:
                problem = f"status {answer.status_code}"
                if answer.status_code < 500 and answer.status_code not in (408, 429):
                    hint = "Check --url, and HF_TOKEN if it needs one."
                    break
                after = answer.headers.get("Retry-After", "0")  # seconds, or a date
                with suppress(urllib3.exceptions.InvalidHeader):  # such as 1.5
                    wait = max(wait, urllib3.Retry().parse_retry_after(after))
            except Exception as e:  # a time-out, a connection cut, JSON that is not as it should be
                problem = type(e).__name__
                hint = NO_NETWORK if isinstance(e, requests.ConnectionError) else RESUME
            if i + 1 < tries:
                print(f"\nrow {first}: {problem}, trying again in {wait:.0f} s", flush=True)
                time.sleep(wait)
        raise SystemExit(f"error: {url}, row {first}: {problem}. {hint}")

    texts, total = ask(start, tries=3)  # alone: so having no network is soon said
    yield from texts
    # No "with": a generator left half read must not wait for threads while it is garbage-collected.
    pool, running = ThreadPoolExecutor(IN_FLIGHT), deque()
    for first in range(start + len(texts), total, ROWS):
        running.append(pool.submit(ask, first))
        if len(running) == IN_FLIGHT:
            yield from running.popleft().result()[0]
    for future in running:
        yield from future.result()[0]

# --- Texts -> tokens -> shards --------------------------------------------------------------------

def tokenise(texts, enc):
    """Yields the tokens of each text of an iterator, uint16, after its end-of-text token."""
    while some := list(islice(texts, ROWS)):  # on all cores; <|endoftext|> in a text is text
        for tokens in enc.encode_ordinary_batch(some, num_threads=os.cpu_count()):
            yield np.array([enc.eot_token, *tokens], dtype="<u2")

def write(path, data, at=0):
    with open(path, "r+b" if at else "wb") as file:
        file.seek(at)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

def write_whole(path, data):
    """Writes bytes to a file that is, at any moment, there whole or as it was; or an OSError."""
    beside = f"{path}.tmp"
    try:
        write(beside, data)
        os.replace(beside, path)
    except OSError:
        Path(beside).unlink(missing_ok=True)  # it may be what fills the disk
        raise

def undecided(state):
    """Whether document 0 is, so far, longer than all the others together, or not there yet."""
    few = state["documents"] <= VAL_EVERY
    return few and state["train_tokens"] < max(1, state["val_tokens"])

def save(folder, state, pending):
    """Moves the pending tokens (arrays by split) to disk: into shards under way (*.bin.part), then
    progress.json, which says how much of those counts. More than that was left by a save cut short,
    and the next one writes over it."""
    if undecided(state):  # whether it is a document or the last tenth that is held out: wait
        return
    size, full = state["shard_tokens"], []
    for split, arrays in pending.items():
        tokens = np.concatenate([np.empty(0, "<u2"), *arrays])
        at = state[split + "_tokens"] - len(tokens)
        while len(tokens):
            part = folder / f"{split}_{at // size:06d}.bin.part"
            now, tokens = np.split(tokens, [size - at % size])
            write(part, now, at=2 * (at % size))
            at += len(now)
            if at % size == 0:
                full.append(part)
        arrays.clear()
    write_whole(folder / "progress.json", json.dumps(state, indent=1).encode())
    for part in full:  # not before: no run that goes on has to write to them
        part.replace(part.with_suffix(""))

def write_shards(documents, limit, folder, state):
    """Puts each document into its split until there are `limit` tokens, saving now and then."""
    began = saved = time.monotonic()
    tokens = resumed_at = state["train_tokens"] + state["val_tokens"]
    pending = {"train": [], "val": []}
    try:
        while tokens < limit and (document := next(documents, None)) is not None:
            state["position"] += 1  # counts empty documents too: where to go on in the source
            if len(document) > 1:  # an empty one is but its end-of-text token
                split = "train" if state["documents"] % VAL_EVERY else "val"
                pending[split].append(document)
                state["documents"] += 1
                state[split + "_tokens"] += len(document)
                tokens += len(document)
            if time.monotonic() - saved > SAVE_EVERY:
                save(folder, state, pending)
                saved = time.monotonic()
                print(f"{state['documents']:,} documents, {tokens:,} tokens, "
                      f"{(tokens - resumed_at) / (saved - began):,.0f} tokens/s",
                      end="   \r" if sys.stdout.isatty() else "\n", flush=True)
    except SystemExit:  # from the source: what came before is kept
        save(folder, state, pending)
        raise
    if undecided(state):
        whole = np.concatenate([np.empty(0, "<u2"), *pending["val"], *pending["train"]])
        at = len(whole) - len(whole) // 10
        if len(whole) - at < 2:  # a sequence has at least two
            raise SystemExit(f"error: {state['documents']} documents in {state['source']}: too "
                             "small for a training and a validation split: use more text")
        pending = {"train": [whole[:at]], "val": [whole[at:]]}
        state.update(train_tokens=at, val_tokens=len(whole) - at,
                     validation="the last tenth of the tokens")
    save(folder, state, pending)
    for part in folder.glob("*.bin.part"):
        part.replace(part.with_suffix(""))
    (folder / "progress.json").replace(folder / "meta.json")

# --- Shards -> batches ----------------------------------------------------------------------------

def read_meta(folder, name="meta.json", numbers=("vocab_size", "train_tokens", "val_tokens"),
              **settings):
    """meta.json (or progress.json) of the data in folder, a dict. Exits unless it has these numbers
    and settings, and the shards hold the tokens that it counts."""
    path = Path(folder, name)
    try:
        meta = json.loads(path.read_bytes())
        meta = {**meta, **{key: int(meta[key]) for key in numbers}}
    except (FileNotFoundError, NotADirectoryError):
        how = path.parent.name if path.parent.name in ("stdlib", "fineweb-edu") else "--help"
        raise SystemExit(f"error: no data in {folder} (no {name}): prepare_data.py {how}")
    except (ValueError, LookupError, TypeError, OverflowError) as e:
        raise SystemExit(f"error: {path} is damaged ({type(e).__name__}): {AGAIN}")
    for key, value in settings.items():
        if meta.get(key) != value:
            raise SystemExit(f"error: {folder} has {key} = {meta.get(key)}, not {value}: {ANEW}")
    for split in ("train", "val"):
        said = meta[split + "_tokens"]
        there = sum(path.stat().st_size // 2 for path in Path(folder).glob(f"{split}_*.bin*"))
        if there < said:
            raise SystemExit(f"error: {folder} holds {there:,} of {said:,} {split} tokens: {AGAIN}")
    return meta

class Tokens:
    """The shards of a split. Batch k of a stream is a pure function of (seed, stream, k): runs that
    differ in anything else see the same batches, and so does a run resumed or spread over ranks."""

    def __init__(self, folder, split, T, vocab_size):
        """T: inputs of a sequence, one fewer than its tokens. Exits if the shards are no use."""
        self.T, self.shards = T, []
        for path in sorted(Path(folder).glob(f"{split}_*.bin")):
            if path.stat().st_size % 2:
                raise SystemExit(f"error: {path} has an odd number of bytes: {AGAIN}")
            if path.stat().st_size:
                self.shards.append(np.memmap(path, dtype="<u2", mode="r"))
                if (largest := self.shards[-1].max()) >= vocab_size:
                    raise SystemExit(f"error: {path} holds the token {largest}, outside the "
                                     f"vocabulary of {vocab_size}: {AGAIN}")
        # Places for a sequence to start, in all shards up to each.
        self.ends = np.cumsum([max(0, len(shard) - T) for shard in self.shards])
        if not self.shards or self.ends[-1] == 0:
            raise SystemExit(f"error: the {split} split of {folder} is shorter than one sequence "
                             f"of {T + 1} tokens: use more text, or a smaller --block_size")

    def batch(self, seed, stream, k, n):
        """int64 array (n, T + 1) of n random sequences: inputs are [:, :-1], targets [:, 1:]."""
        out = np.empty((n, self.T + 1), dtype=np.int64)
        starts = np.random.default_rng((seed, stream, k)).integers(self.ends[-1], size=n)
        for row, start in zip(out, starts):
            i = np.searchsorted(self.ends, start, side="right")
            start -= self.ends[i - 1] if i else 0
            row[:] = self.shards[i][start:start + self.T + 1]
        return out

# --- The command ----------------------------------------------------------------------------------

def claim(file, what):
    """Locks an open file until it is closed or this process ends. Exits if another one has it."""
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"error: {what} is in use by another process")
    except OSError:  # a file system without locks: go on, as on a system without
        pass

def count(text):
    number = re.fullmatch(r"([1-9]\d*(?:\.\d+)?)([kMB]?)", text)  # None: argparse says so
    return round(float(number[1]) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9}[number[2]])

def choose(args):
    """(Files to read, none for fineweb-edu; characters in the longest document; folder to write;
    the settings, which must be the same for a run to go on where another was)."""
    paths, longest, tokenizer, source = [], PIECE, "gpt2", " ".join(args.source)
    name = args.name or (source if source in ("stdlib", "fineweb-edu") else "")
    if Path(name).name != name or name in ("", ".."):
        raise SystemExit("error: choose a name with --name: that of a folder, made below --out")
    if source == "stdlib":
        skip = {"test", "tests", "idle_test", "site-packages"}
        paths = files_below(sysconfig.get_paths()["stdlib"], ".py", skip)
        source = f"standard library of Python {platform.python_version()}"
        tokenizer, longest = "bytes", sys.maxsize  # modules are not cut
    elif source == "fineweb-edu":
        source = " ".join(FINEWEB.values())
        args.tokens = args.tokens or 400_000_000
    else:
        for path in map(Path, args.source):
            paths += files_below(path, ENDINGS) if path.is_dir() else [path]
        if not paths:
            raise SystemExit(f"error: no file below {source} ends in {', '.join(ENDINGS)}")
    input_bytes = sum(path.stat().st_size for path in paths)  # to notice input that has changed
    return paths, longest, Path(args.out, name), {
        "source": source, "tokenizer": args.tokenizer or tokenizer, "tokens": args.tokens,
        "shard_tokens": args.shard_tokens, "input_bytes": input_bytes}

def prepare(args):
    paths, longest, folder, settings = choose(args)
    if (folder / "meta.json").exists() and not args.overwrite:
        n = read_meta(folder, "meta.json", COUNTS, **settings)["train_tokens"]
        return print(f"{folder} is there already, with {n:,} train tokens (--overwrite: anew)")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "wb") as lock:
        claim(lock, folder)
        state = {**settings, "validation": f"every {VAL_EVERY}th document, the first among them",
                 **dict.fromkeys(COUNTS, 0)}
        if (folder / "progress.json").exists() and not args.overwrite:
            state.update(read_meta(folder, "progress.json", COUNTS, **settings))
        elif list(folder.glob("*.bin")) and not args.overwrite:
            raise SystemExit(f"error: {folder} holds shards of unknown origin: {ANEW}")
        enc = get_tokenizer(settings["tokenizer"])
        state.update(vocab_size=enc.n_vocab, eot=enc.eot_token)
        if undecided(state):  # a start: what another run left, meta.json first, is no part of it
            ours = r"(meta|progress)\.json(\.tmp)?|(train|val)_\d{6}\.bin(\.part)?"
            for path in sorted(folder.iterdir()):
                if re.fullmatch(ours, path.name):
                    path.unlink()
            state.update(dict.fromkeys(COUNTS, 0))
        if paths:
            texts = (text for path in paths for text in read_file(path, longest))
            texts = islice(texts, state["position"], None)
        else:
            texts = fetch_rows(args.url, args.timeout, state["position"])
        write_shards(tokenise(texts, enc), args.tokens or sys.maxsize, folder, state)
    (folder / "lock").unlink(missing_ok=True)
    print(f"{folder}: {state['train_tokens']:,} train and {state['val_tokens']:,} val tokens "
          f"({state['validation']}) in {state['documents']:,} documents "
          f"({state['position'] - state['documents']} more were empty, or cut short by the API)")

def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: sys.exit(f"error: {message} (--help says more)")
    add = parser.add_argument
    add("source", nargs="+", help="stdlib, fineweb-edu, or files and folders of your own")
    add("--name", help="folder below --out (default: stdlib or fineweb-edu)")
    add("--out", default="data", help="(default: data)")
    add("--tokenizer", choices=["gpt2", "bytes"], help="(default: bytes for stdlib, else gpt2)")
    add("--tokens", type=count, help="stop after so many (default: 400M of fineweb-edu, else all)")
    add("--shard_tokens", type=count, default="100M", help="in a full shard (default: 100M)")
    add("--url", default="https://datasets-server.huggingface.co/rows", help="of the rows API")
    add("--timeout", type=float, default=30, help="seconds for a request (default: 30)")
    add("--overwrite", action="store_true", help="replace the data of this name")
    try:
        prepare(parser.parse_args(argv))
    except OSError as e:  # a file that is not there, or, with no name, a disk that is full
        what = f"{e.filename}: {e.strerror}" if e.filename else f"{e.strerror or e}. {RESUME}"
        raise SystemExit(f"error: {what}")

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # of names that the terminal cannot show
    try:
        main()
    except KeyboardInterrupt:  # at any moment: what is on disk is always good
        print(f"\nstopped. {RESUME}", file=sys.stderr, flush=True)
        os._exit(130)  # without waiting for the requests in flight
