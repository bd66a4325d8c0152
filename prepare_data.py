"""
Turns text into binary token shards, data/<name>/train_000000.bin, ..., val_000000.bin, ... and,
last of all, meta.json; and reads them: read_meta and Tokens, below, are for train.py.

    python prepare_data.py stdlib                     # Python's own source, as bytes: no network
    python prepare_data.py fineweb-edu --tokens 400M  # the paper's schedule uses 377M GPT-2 tokens
    python prepare_data.py my/*.txt --name mine       # text in UTF-8, folders of it, .jsonl (its
                                                      # field "text"), and .xz or .gz of these

A shard is raw little-endian uint16 token ids; each document follows its end-of-text token. Every
50th document, the first among them, is held out for validation. Where that is one document, longer
than all the others together, it is the last tenth of the tokens instead, so that one file of 20 KB
gives both splits; meta.json says which it was. Stopped or killed at any moment, the same command
goes on where it was, and the shards come out byte for byte as if it had never stopped.
"""
import argparse, codecs, gzip, json, lzma, os, platform, re, signal, sys, sysconfig, threading, time
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import requests
import tiktoken
import urllib3  # requests'
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

VAL_EVERY = 50      # documents 0, 50, 100, ... are validation: fetching more never moves one
PIECE = 64 * 1024   # a longer text file is cut into documents of so many characters
CHUNK = 256 * 1024  # characters tokenised as one task: bounds memory, be documents tweets or books
AHEAD = 64          # chunks read ahead, some 50 MB: with fewer, reading gets in tokenising's way
SAVE_EVERY = 2.0    # seconds between saves, and so the most work that a kill can cost
ROWS, IN_FLIGHT = 100, 8  # rows a request (the API's limit), and requests at a time
TRIES, FIRST_WAIT, LONGEST_WAIT = 10, 1.0, 60  # waits 1, 2, 4, ... seconds: some 4 minutes in all
FINEWEB = {"dataset": "HuggingFaceFW/fineweb-edu", "config": "sample-10BT", "split": "train"}
ENDINGS = (".txt", ".md", ".py", ".jsonl", ".xz", ".gz")
COUNTS = ("position", "documents", "train_tokens", "val_tokens")
NO_NETWORK = ("Without network: stdlib, or your own files with --tokenizer bytes, or, for gpt2, "
              "TIKTOKEN_CACHE_DIR set to a copy of the cache of a machine that has it.")
EVERY_50TH = f"every {VAL_EVERY}th document, the first among them"
RESUME = "The same command (without --overwrite) resumes."
AGAIN = "make these data again: prepare_data.py with --overwrite"

def get_tokenizer(name):
    """The tiktoken.Encoding "gpt2" (50,257 tokens, downloaded once) or "bytes" (256 + 1)."""
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str="(?s:.)", mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 256}, explicit_n_vocab=257)
    try:
        return tiktoken.get_encoding(name)
    except Exception as e:  # having no network shows up as any of a dozen kinds
        raise SystemExit(f"error: cannot download tokenizer {name} ({type(e).__name__}). "
                         f"{NO_NETWORK}")

# --- Sources: generators of (text, share of the source read so far), from document `start` on -----

def files_below(folder, endings, skip=()):
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        found += [Path(here, name) for name in names if name.endswith(endings)]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())

def read_file(path, longest):
    """Yields (text, bytes of the file read so far): each line's of a .jsonl file; other text in
    pieces of whole lines, up to `longest` characters."""
    packed = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix)
    jsonl = (path.stem if packed else path.name).endswith(".jsonl")
    decoder, piece = codecs.getincrementaldecoder("utf-8")(), ""
    with open(path, "rb") as raw:
        file = packed(raw) if packed else raw
        try:
            if (mark := file.read(3)) != codecs.BOM_UTF8:  # its byte order mark is no text
                file.seek(0)
            offset = file.tell()
            lines = iter(lambda: file.readline(-1 if jsonl else longest), b"")
            for number, line in enumerate(lines, 1):
                offset += len(line)
                text = decoder.decode(line, final=jsonl)
                if jsonl:
                    if not text.isspace():  # + "": a TypeError if it is no string
                        yield json.loads(text)["text"] + "", raw.tell()
                elif len(piece) + len(text) > longest:
                    yield piece, raw.tell()
                    piece = text
                else:
                    piece += text
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as e:  # e.object: the line, after what was left of the one before
            at = offset - len(e.object) + e.start
            found = "UTF-16" if mark.startswith((b"\xff\xfe", b"\xfe\xff")) else "ITS-ENCODING"
            raise SystemExit(f"error: {path} is not UTF-8 (byte {at}): save it as that in an "
                             f"editor, or convert it by iconv -f {found} -t UTF-8")
        except (KeyError, TypeError):
            raise SystemExit(f'error: {path}, line {number}: no object with a string "text"')
        except (ValueError, RecursionError) as e:
            what = getattr(e, "msg", type(e).__name__)
            raise SystemExit(f"error: {path}, line {number}: not JSON ({what})")
        except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as e:
            raise SystemExit(f"error: {path} is damaged: {e}")
        if piece:
            yield piece, raw.tell()

def read_files(paths, longest, start):
    total, before, position = sum(path.stat().st_size for path in paths), 0, 0
    for path in paths:
        for text, so_far in read_file(path, longest):
            if position >= start:
                yield text, (before + so_far) / total
            position += 1
        before += path.stat().st_size

def fetch_rows(url, timeout, start):
    """FineWeb-Edu by the dataset viewer's rows API: several requests in flight, rows in order."""
    session, stopped = requests.Session(), threading.Event()
    if os.environ.get("HF_TOKEN"):
        session.headers["Authorization"] = "Bearer " + os.environ["HF_TOKEN"]

    def get(offset, total=None):
        """(rows there are, texts of the 100 from offset on): asks until the answer is right."""
        query, reached = {**FINEWEB, "offset": offset, "length": ROWS}, total is not None
        for attempt in range(1, TRIES + 1):
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 1))
            tries, hint = TRIES, RESUME
            try:
                answer = session.get(url, params=query, timeout=(min(10, timeout), timeout))
                status, reached = answer.status_code, True
                problem = f"status {status}"
                if status == 200:
                    body = answer.json()
                    rows, total = body["rows"], total or body["num_rows_total"]
                    # A text that the API has cut short is not the document: "" has it skipped.
                    texts = ["" if "text" in row["truncated_cells"] else row["row"]["text"] + ""
                             for row in rows]
                    wanted = list(range(offset, min(offset + ROWS, total)))
                    if [row["row_idx"] for row in rows] == wanted:
                        return total, texts
                    problem = "other rows than asked for"
                elif 400 <= status < 500 and status not in (408, 429):
                    tries, hint = attempt, "Check --url, and HF_TOKEN if it needs one."
                elif "Retry-After" in answer.headers:  # seconds, or a date
                    wait = urllib3.Retry().parse_retry_after(answer.headers["Retry-After"])
            # A time-out, a connection cut, JSON that is malformed or of another shape:
            except (requests.RequestException, urllib3.exceptions.HTTPError,
                    ValueError, LookupError, TypeError) as e:
                problem = type(e).__name__
                if not reached:
                    tries, hint = 3, NO_NETWORK
            if attempt >= tries or stopped.is_set():
                raise SystemExit(f"error: {url}, row {offset}: {problem}, {attempt} tries. {hint}")
            if wait >= 5:
                print(f"\nrow {offset}: {problem}, trying again in {wait:.0f} s", flush=True)
            stopped.wait(wait)

    pool = ThreadPoolExecutor(IN_FLIGHT)
    try:
        total, texts = get(start)  # alone: it tells how many rows there are, or of no network
        offsets = iter(range(start + ROWS, total, ROWS))
        running = deque(pool.submit(get, at, total) for _, at in zip(range(IN_FLIGHT), offsets))
        while texts:
            for text in texts:
                start += 1
                yield text, start / total
            texts = running.popleft().result()[1] if running else []
            running.extend(pool.submit(get, at, total) for _, at in zip(range(1), offsets))
    finally:
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)

# --- Documents -> tokens -> shards ----------------------------------------------------------------

def tokenise(documents, enc):
    """Yields (uint16 array, share read) of each document: this thread reads on while one for each
    core encodes."""
    def encode(text):
        if not text:
            return np.empty(0, "<u2")
        try:  # as encode_ordinary, where <|endoftext|> in a text is text, but faster: no list
            tokens = enc.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # half a surrogate pair, which JSON may hold
            tokens = enc.encode_ordinary(text)
        return np.concatenate([[enc.eot_token], tokens], dtype="<u2", casting="unsafe")

    def encode_chunk(chunk):
        return [(encode(text), share) for text, share in chunk]

    running, chunk, size, failure = deque(), [], 0, None
    ahead = max(AHEAD, 2 * os.cpu_count())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for text, share in documents:
                chunk.append((text, share))
                size += len(text) + 100  # the shortest document takes memory too
                if size >= CHUNK:
                    running.append(pool.submit(encode_chunk, chunk))
                    chunk, size = [], 0
                while running and (running[0].done() or len(running) > ahead):
                    yield from running.popleft().result()
        except SystemExit as e:  # what the source gave before it failed is good
            failure = e
        running.append(pool.submit(encode_chunk, chunk))
        while running:
            yield from running.popleft().result()
    if failure:
        raise failure

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
    """Whether the rule for validation may yet be the last tenth of the tokens: so far it is the
    first document alone, longer than all the others together."""
    return state["documents"] <= VAL_EVERY and state["val_tokens"] > state["train_tokens"]

def save(folder, state, pending):
    """Moves the pending tokens (arrays by split) to disk: into shards under way (*.bin.part), then
    progress.json, which says how much of those counts. More than that was left by a save cut short,
    and the next one writes over it. While the rule is undecided, all stays in memory."""
    if undecided(state):
        return
    size = state["shard_tokens"]
    for split, arrays in pending.items():
        tokens = np.concatenate([np.empty(0, "<u2"), *arrays])
        at = state[split + "_tokens"] - len(tokens)
        while len(tokens):
            now, tokens = np.split(tokens, [size - at % size])
            write(folder / f"{split}_{at // size:06d}.bin.part", now, at=2 * (at % size))
            at += len(now)
    write_whole(folder / "progress.json", json.dumps(state, indent=1).encode())
    for split, arrays in pending.items():
        arrays.clear()
        for part in folder.glob(f"{split}_*.bin.part"):
            if (int(part.name[-15:-9]) + 1) * size <= state[split + "_tokens"]:
                part.replace(part.with_suffix(""))

def collect(documents, limit, folder, state, pending):
    """Puts each document into its split until there are `limit` tokens, saving now and then."""
    end, limit = "   \r" if sys.stdout.isatty() else "\n", limit or sys.maxsize
    began = saved = time.monotonic()
    tokens = resumed_at = state["train_tokens"] + state["val_tokens"]
    first = None
    while tokens < limit and (document_and_share := next(documents, None)):
        document, share = document_and_share
        state["position"] += 1  # counts skipped documents too: where to go on in the source
        if len(document):
            split = "train" if state["documents"] % VAL_EVERY else "val"
            pending[split].append(document)
            state["documents"] += 1
            state[split + "_tokens"] += len(document)
            tokens += len(document)
        share, now = max(share, tokens / limit), time.monotonic()
        first = first or share
        if now - saved > SAVE_EVERY:
            save(folder, state, pending)
            saved, rate = now, (tokens - resumed_at) / (now - began)
            left = (now - began) * (1 - share) / max(share - first, 1e-9)
            print(f"{state['documents']:,} documents, {tokens:,} tokens, {rate:,.0f} tokens/s, "
                  f"{left // 60:.0f} min {left % 60:.0f} s left", end=end, flush=True)

def finish(folder, state, pending, enc):
    """Moves the rest to disk, or all of it by the other rule if it comes to that; and meta.json."""
    if undecided(state):
        tokens = np.concatenate([*pending["val"], *pending["train"]])  # in the order of the source
        at = len(tokens) - len(tokens) // 10
        pending = {"train": [tokens[:at]], "val": [tokens[at:]]}
        state.update(train_tokens=at, val_tokens=len(tokens) - at,
                     validation="the last tenth of the tokens")
    if min(state["train_tokens"], state["val_tokens"]) < 2:  # a sequence has at least two
        remove_own_files(folder)
        raise SystemExit(f"error: {state['documents']} documents in {state['source']}: too small "
                         "for a training and a validation split: use more text")
    save(folder, state, pending)
    for part in folder.glob("*.bin.part"):
        part.replace(part.with_suffix(""))
    state.update(vocab_size=enc.n_vocab, eot=enc.eot_token)
    write_whole(folder / "meta.json", json.dumps(state, indent=1).encode())
    (folder / "progress.json").unlink()

def remove_own_files(folder):
    ours = r"(meta|progress)\.json(\.tmp)?|(train|val)_\d{6}\.bin(\.part)?"
    for path in sorted(folder.glob("*")):  # meta.json first, so that no part passes for the whole
        if re.fullmatch(ours, path.name):
            path.unlink()

# --- Shards -> batches ----------------------------------------------------------------------------

def load(path, keys):
    """The JSON object in the file, an integer under each of the keys. Exits if it is damaged."""
    try:
        content = json.loads(path.read_bytes())
        return {**content, **{key: int(content[key]) for key in keys}}
    except (ValueError, LookupError, TypeError, OverflowError) as e:
        raise SystemExit(f"error: {path} is damaged ({type(e).__name__}): {AGAIN}")

def check_shards(folder, state):
    """Exits unless the shards hold all the tokens that state (meta.json, progress.json) counts."""
    for split in ("train", "val"):
        said = state[split + "_tokens"]
        there = sum(path.stat().st_size // 2 for path in Path(folder).glob(f"{split}_*.bin*"))
        if there < said:
            raise SystemExit(f"error: {folder} holds {there:,} of {said:,} {split} tokens: {AGAIN}")

def read_meta(folder):
    """meta.json of the data in folder, a dict. Exits unless the shards hold what it says."""
    folder = Path(folder)
    try:
        meta = load(folder / "meta.json", ("vocab_size", "train_tokens", "val_tokens"))
    except (FileNotFoundError, NotADirectoryError):
        how = folder.name if folder.name in ("stdlib", "fineweb-edu") else "--help"
        raise SystemExit(f"error: no data in {folder} (no meta.json): prepare_data.py {how}")
    check_shards(folder, meta)
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
    """Locks an open file until it is closed or this process ends, in whatever way. Exits with one
    line if another process has it; does nothing where the system has no such locks."""
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"error: {what} is in use by another process")
    except OSError:  # a file system without locks
        pass

def count(text):
    match = re.fullmatch(r"([1-9]\d*(?:\.\d+)?)([kMB]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text} is no number of tokens such as 5000, 2.5M or 1B")
    return round(float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9}[match[2]])

def choose(args):
    """(Files to read, none for fineweb-edu; characters in the longest document; folder to write;
    the settings, which must be the same for a run to go on where another was)."""
    paths, longest, name, tokenizer, source = [], PIECE, args.name, "gpt2", " ".join(args.source)
    if args.source == ["stdlib"]:
        skip = {"test", "tests", "idle_test", "site-packages"}
        paths = files_below(sysconfig.get_paths()["stdlib"], ".py", skip)
        name, tokenizer, longest = name or "stdlib", "bytes", sys.maxsize  # modules are not cut
        source = f"standard library of Python {platform.python_version()}"
    elif args.source == ["fineweb-edu"]:
        name, source = name or "fineweb-edu", " ".join(FINEWEB.values())
        args.tokens = args.tokens or 400_000_000
    else:
        for path in map(Path, args.source):
            paths += files_below(path, ENDINGS) if path.is_dir() else [path]
        if not paths:
            raise SystemExit(f"error: no file below {source} ends in {', '.join(ENDINGS)}")
    if not name or Path(name).name != name or name == "..":
        raise SystemExit("error: choose a name with --name: that of a folder, made below --out")
    input_bytes = sum(path.stat().st_size for path in paths)  # to notice input that has changed
    return paths, longest, Path(args.out, name), {
        "source": source, "tokenizer": args.tokenizer or tokenizer, "tokens": args.tokens,
        "shard_tokens": args.shard_tokens, "input_bytes": input_bytes}

def recorded(path, settings):
    """The counts in meta.json or progress.json, whose data must be of these settings and whole."""
    old = load(path, COUNTS)
    for key, value in settings.items():
        if old.get(key) != value and old["position"]:  # at 0 a first try failed: nothing to keep
            raise SystemExit(f"error: {path.parent} holds data with {key} = {old.get(key)}, this "
                             f"is {value}: add --overwrite, or choose another --name")
    check_shards(path.parent, old)
    return {key: old[key] for key in (*COUNTS, "validation") if key in old}

def prepare(args):
    paths, longest, folder, settings = choose(args)
    meta, progress, lock = (folder / name for name in ("meta.json", "progress.json", "lock"))
    if meta.exists() and not args.overwrite:
        n = recorded(meta, settings)["train_tokens"]
        return print(f"{folder} is there already, with {n:,} train tokens (--overwrite: anew)")
    folder.mkdir(parents=True, exist_ok=True)
    with open(lock, "wb") as file:
        claim(file, folder)
        state = {**settings, "validation": EVERY_50TH, **dict.fromkeys(COUNTS, 0)}
        if progress.exists() and not args.overwrite:
            state.update(recorded(progress, settings))
        elif list(folder.glob("*.bin")) and not args.overwrite:
            raise SystemExit(f"error: {folder} holds shards of unknown origin: add --overwrite, or "
                             "choose another --name")
        enc = get_tokenizer(settings["tokenizer"])
        if args.overwrite or undecided(state):  # the latter from before save() waited
            remove_own_files(folder)
            state.update(dict.fromkeys(COUNTS, 0))
        pending = {"train": [], "val": []}
        save(folder, state, pending)  # or renames what a killed run had no time to
        if args.source == ["fineweb-edu"]:
            documents = fetch_rows(args.url, args.timeout, state["position"])
        else:
            documents = read_files(paths, longest, state["position"])
        try:
            collect(tokenise(documents, enc), args.tokens, folder, state, pending)
        except SystemExit:  # from the source: what came before is kept
            save(folder, state, pending)
            raise
        finish(folder, state, pending, enc)
        lock.unlink()  # left by a run that was stopped it is nobody's, and in nobody's way
    print(f"{folder}: {state['train_tokens']:,} train and {state['val_tokens']:,} val tokens "
          f"({state['validation']}) in {state['documents']:,} documents "
          f"({state['position'] - state['documents']} more were empty, or cut short by the API)")

def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", nargs="+", help="stdlib, fineweb-edu, or files and folders of your own")
    add("--name", help="folder below --out (default: stdlib or fineweb-edu)")
    add("--out", default="data", help="(default: %(default)s)")
    add("--tokenizer", choices=["gpt2", "bytes"], help="(default: bytes for stdlib, else gpt2)")
    add("--tokens", type=count, help="stop after so many (default: 400M of fineweb-edu, else all)")
    add("--shard_tokens", type=count, default=100_000_000, help="in a full shard (default: 100M)")
    add("--url", default="https://datasets-server.huggingface.co/rows",
        help="rows API (default: %(default)s)")
    add("--timeout", type=float, default=30, help="seconds for a request (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace the data of this name")
    parser.error = lambda message: sys.exit(f"error: {message} (--help says more)")
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
