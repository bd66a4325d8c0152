"""
Turns text into binary token shards: data/<name>/train_000000.bin, ..., val_000000.bin, ... and, last of all, meta.json.

    python prepare_data.py stdlib                                  # Python's own source, as bytes: seconds, no network
    python prepare_data.py fineweb-edu --tokens 400M               # the paper's schedule uses 377M GPT-2 tokens
    python prepare_data.py my/*.txt --name mine --tokenizer gpt2   # text, folders, .jsonl (field "text"), .xz and .gz

A shard is raw little-endian uint16 token ids; each document follows its end-of-text token. Stopped or killed at any
moment, the same command goes on where it was, and the shards come out byte for byte as if it had never stopped.
"""
import argparse, codecs, gzip, json, lzma, os, platform, re, signal, sys, sysconfig, threading, time, zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import requests
import tiktoken
import urllib3  # requests'

VAL_EVERY = 50      # documents 0, 50, 100, ... are validation: fixed by order, so fetching more never moves one
PIECE = 64 * 1024   # a longer text file is cut into documents of so many characters: even one file gives both splits
CHUNK = 256 * 1024  # characters tokenised as one task: bounds memory, whether documents are tweets or books
AHEAD = 64          # chunks read ahead, some 50 MB: with fewer, on two cores, reading gets in the way of tokenising
SAVE_EVERY = 2.0    # seconds between saves, and so the most work that a kill can cost
ROWS, IN_FLIGHT = 100, 8                       # rows a request (the API's limit), and requests at a time
TRIES, FIRST_WAIT, LONGEST_WAIT = 10, 1.0, 60  # a failed request waits 1, 2, 4, ... seconds: some 4 minutes in all
FINEWEB = {"dataset": "HuggingFaceFW/fineweb-edu", "config": "sample-10BT", "split": "train"}
NO_NETWORK = ("Without network: use stdlib, or your own files with --tokenizer bytes; for gpt2, set TIKTOKEN_CACHE_DIR "
              "to a copy of the cache of a machine that has it.")
RESUME = "The same command (without --overwrite) resumes."

def get_tokenizer(name):
    """The tiktoken.Encoding "gpt2" (50,257 tokens, downloaded once) or "bytes" (the 256 bytes and end-of-text)."""
    if name == "bytes":
        return tiktoken.Encoding("bytes", pat_str="(?s:.)", mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|endoftext|>": 256}, explicit_n_vocab=257)
    result = ["no answer in 60 s"]

    def load():
        try:
            result[0] = tiktoken.get_encoding(name)
        except Exception as e:  # having no network shows up as any of a dozen kinds
            result[0] = type(e).__name__

    # tiktoken downloads without a time-out; waiting for a thread puts one around it.
    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(60)
    if isinstance(result[0], str):
        raise SystemExit(f"error: tokenizer {name} is not cached and cannot be downloaded ({result[0]}). {NO_NETWORK}")
    return result[0]

def check_shards(folder, state):
    """Exits with one line unless the shards in folder hold all the tokens that state, its meta.json or progress.json, counts."""
    for split in ("train", "val"):
        there = sum(path.stat().st_size // 2 for path in Path(folder).glob(f"{split}_*.bin*"))
        if there < state[split + "_tokens"]:
            raise SystemExit(f"error: {folder} holds {there:,} of {state[split + '_tokens']:,} {split} tokens: a shard is cut short or "
                             "gone, so make these data again: prepare_data.py with --overwrite")

# --- Sources: generators of (text, share of the source read so far), from document number `start` on ------------------

def files_below(folder, endings, skip=()):
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        found += [Path(here, name) for name in names if name.endswith(endings)]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())

def read_file(path, longest):
    """Yields (text, bytes of the file read so far): each line of a .jsonl file; other text in pieces of whole lines."""
    packed = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix)
    jsonl = (path.stem if packed else path.name).endswith(".jsonl")
    decoder, offset, piece = codecs.getincrementaldecoder("utf-8")(), 0, ""
    with open(path, "rb") as raw:
        file = packed(raw) if packed else raw
        try:
            for number, line in enumerate(iter(lambda: file.readline(-1 if jsonl else longest), b""), 1):
                offset += len(line)
                text = decoder.decode(line, final=jsonl)
                if jsonl and not text.isspace():
                    yield json.loads(text)["text"] + "", raw.tell()  # + "": a TypeError if it is no string
                elif jsonl:
                    continue
                elif len(piece) + len(text) > longest:
                    yield piece, raw.tell()
                    piece = text
                else:
                    piece += text
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as e:  # e.object is the line, after what the decoder kept of the one before
            raise SystemExit(f"error: {path} is not UTF-8 (byte {offset - len(e.object) + e.start}): convert it first, say with iconv")
        except (KeyError, TypeError):
            raise SystemExit(f'error: {path}, line {number}: no object with a string "text"')
        except (ValueError, RecursionError) as e:
            raise SystemExit(f"error: {path}, line {number}: not JSON ({getattr(e, 'msg', type(e).__name__)})")
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
        """(rows there are, texts of the 100 from `offset` on): asks until the answer is whole and the one asked for."""
        query, reached = {**FINEWEB, "offset": offset, "length": ROWS}, total is not None
        for attempt in range(1, TRIES + 1):
            wait, tries, hint = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 1)), TRIES, RESUME
            try:
                answer = session.get(url, params=query, timeout=(min(10, timeout), timeout))
                status, reached = answer.status_code, True
                problem = f"status {status}"
                if status == 200:
                    body = answer.json()
                    rows, total = body["rows"], total or body["num_rows_total"]
                    # A text that the API has cut short is not the document: "" has it skipped.
                    texts = ["" if "text" in row["truncated_cells"] else row["row"]["text"] + "" for row in rows]
                    if [row["row_idx"] for row in rows] == list(range(offset, min(offset + ROWS, total))):
                        return total, texts
                    problem = "other rows than asked for"
                elif 400 <= status < 500 and status not in (408, 429):
                    tries, hint = attempt, "Check --url, and HF_TOKEN if it needs one."
                elif "Retry-After" in answer.headers:  # seconds, or a date
                    wait = urllib3.Retry().parse_retry_after(answer.headers["Retry-After"])
            except (requests.RequestException, urllib3.exceptions.HTTPError, ValueError, LookupError, TypeError) as e:
                problem = type(e).__name__  # a time-out, a connection cut, JSON that is malformed or of another shape
                if not reached:
                    tries, hint = 3, NO_NETWORK
            if attempt >= tries or stopped.is_set():
                raise SystemExit(f"error: {url}, row {offset}: {problem}, {attempt} tries. {hint}")
            if wait >= 5:
                print(f"\nrow {offset}: {problem}, trying again in {wait:.0f} s", flush=True)
            stopped.wait(wait)

    pool = ThreadPoolExecutor(IN_FLIGHT)
    try:
        total, texts = get(start)  # alone, since it tells how many rows there are, and whether there is a network
        offsets = iter(range(start + ROWS, total, ROWS))
        running = deque(pool.submit(get, offset, total) for _, offset in zip(range(IN_FLIGHT), offsets))
        while texts:
            for text in texts:
                start += 1
                yield text, start / total
            texts = running.popleft().result()[1] if running else []
            running.extend(pool.submit(get, offset, total) for _, offset in zip(range(1), offsets))
    finally:
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)

# --- Documents -> tokens -> shards ------------------------------------------------------------------------------------

def tokenise(documents, enc):
    """Yields (tokens, share read) of each document, in order: this thread reads on while one for each core encodes."""
    def encode(text):
        if not text:
            return np.empty(0, "<u2")
        try:  # as encode_ordinary, where <|endoftext|> in a text is text, but a tenth faster for making no list
            tokens = enc.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # half a surrogate pair, which JSON may hold
            tokens = enc.encode_ordinary(text)
        return np.concatenate([[enc.eot_token], tokens], dtype="<u2", casting="unsafe")

    def encode_chunk(chunk):
        return [(encode(text), share) for text, share in chunk]

    running, chunk, size, failure = deque(), [], 0, None
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for text, share in documents:
                chunk.append((text, share))
                size += len(text) + 100  # the shortest document takes memory too
                if size >= CHUNK:
                    running.append(pool.submit(encode_chunk, chunk))
                    chunk, size = [], 0
                while running and (running[0].done() or len(running) > max(AHEAD, 2 * os.cpu_count())):
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

def write_json(path, content):
    beside = path.with_name(path.name + ".tmp")
    write(beside, json.dumps(content, indent=1).encode())
    os.replace(beside, path)  # at any moment the file is there whole, or as it was

def save(folder, state, pending):
    """Moves the pending tokens to disk: into shards under way (*.bin.part), then progress.json, which says how much of
    those counts. More than that was left by a save cut short, and the next one writes over it."""
    size = state["shard_tokens"]
    for split, arrays in pending.items():
        tokens = np.concatenate([np.empty(0, "<u2"), *arrays])
        at = state[split + "_tokens"] - len(tokens)
        while len(tokens):
            now, tokens = np.split(tokens, [size - at % size])
            write(folder / f"{split}_{at // size:06d}.bin.part", now, at=2 * (at % size))
            at += len(now)
    write_json(folder / "progress.json", state)
    for split, arrays in pending.items():
        arrays.clear()
        for part in folder.glob(f"{split}_*.bin.part"):
            if (int(part.name[-15:-9]) + 1) * size <= state[split + "_tokens"]:
                part.replace(part.with_suffix(""))

def remove_own_files(folder):
    ours = r"(meta|progress)\.json(\.tmp)?|(train|val)_\d{6}\.bin(\.part)?"
    for path in sorted(folder.glob("*")):  # meta.json is first to go, so that nothing incomplete passes for finished
        if re.fullmatch(ours, path.name):
            path.unlink()

# --- The command ------------------------------------------------------------------------------------------------------

def count(text):
    match = re.fullmatch(r"([1-9]\d*(?:\.\d+)?)([kMB]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text} is no number of tokens such as 5000, 10k, 2.5M or 1B")
    return round(float(match[1]) * {"": 1, "k": 1e3, "M": 1e6, "B": 1e9}[match[2]])

def prepare(args):
    # What to read, and with which settings. input_bytes is there to notice input that has changed.
    paths, longest, name, tokenizer, source = [], PIECE, args.name, "gpt2", " ".join(args.source)
    endings = (".txt", ".md", ".py", ".jsonl", ".xz", ".gz")
    if args.source == ["stdlib"]:
        paths = files_below(sysconfig.get_paths()["stdlib"], ".py", {"test", "tests", "idle_test", "site-packages"})
        longest = sys.maxsize  # a module is one document
        name, tokenizer, source = name or "stdlib", "bytes", f"standard library of Python {platform.python_version()}"
    elif args.source == ["fineweb-edu"]:
        name, source, args.tokens = name or "fineweb-edu", " ".join(FINEWEB.values()), args.tokens or 400_000_000
    else:
        for path in map(Path, args.source):
            paths += files_below(path, endings) if path.is_dir() else [path]
        if not paths:
            raise SystemExit(f"error: no file below {source} ends in {', '.join(endings)}")
    if not name or Path(name).name != name:
        raise SystemExit("error: choose a name for these data with --name: that of a folder, made below --out")
    folder = Path(args.out, name)
    settings = {"source": source, "tokenizer": args.tokenizer or tokenizer, "shard_tokens": args.shard_tokens,
                "tokens": args.tokens, "input_bytes": sum(path.stat().st_size for path in paths)}

    # What the folder holds: all of it already, a part of it, or something else.
    state = {**settings, "position": 0, "documents": 0, "train_tokens": 0, "val_tokens": 0}
    known = [path for path in (folder / "meta.json", folder / "progress.json") if path.exists()]
    if known and not args.overwrite:
        try:
            old = json.loads(known[0].read_text())
            counts = {key: int(old[key]) for key in ("position", "documents", "train_tokens", "val_tokens")}
        except (ValueError, LookupError, TypeError) as e:
            raise SystemExit(f"error: {known[0]} is damaged ({type(e).__name__}): make these data again with --overwrite")
        for key, value in settings.items():
            if old.get(key) != value and counts["position"]:  # at 0 a first try failed: there is nothing to keep
                raise SystemExit(f"error: {folder} holds data with {key} = {old.get(key)}, this is {value}: "
                                 "add --overwrite to replace it, or choose another --name")
        state.update(counts)
        check_shards(folder, state)
        if known[0].name == "meta.json":
            return print(f"{folder} is there already, with {state['train_tokens']:,} train tokens (--overwrite: anew)")
    elif list(folder.glob("*.bin")) and not args.overwrite:
        raise SystemExit(f"error: {folder} holds shards of unknown origin: add --overwrite, or choose another --name")
    enc = get_tokenizer(settings["tokenizer"])
    if args.overwrite:
        remove_own_files(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pending = {"train": [], "val": []}
    save(folder, state, pending)  # claims the folder, or renames what a killed run had no time to

    # One document at a time into pending, and pending to disk every now and then.
    if args.source == ["fineweb-edu"]:
        documents = fetch_rows(args.url, args.timeout, state["position"])
    else:
        documents = read_files(paths, longest, state["position"])
    stream, end = tokenise(documents, enc), "   \r" if sys.stdout.isatty() else "\n"
    began = saved = time.monotonic()
    tokens = resumed_at = state["train_tokens"] + state["val_tokens"]
    first = None
    try:
        while args.tokens is None or tokens < args.tokens:
            document, share = next(stream, (None, 1.0))
            if document is None:
                break
            state["position"] += 1  # counts skipped documents too: where to go on in the source
            if len(document):
                split = "train" if state["documents"] % VAL_EVERY else "val"
                pending[split].append(document)
                state["documents"] += 1
                state[split + "_tokens"] += len(document)
                tokens += len(document)
            share, now = max(share, tokens / (args.tokens or sys.maxsize)), time.monotonic()
            first = share if first is None else first
            if now - saved > SAVE_EVERY:
                save(folder, state, pending)
                saved, rate = now, (tokens - resumed_at) / (now - began)
                left = (now - began) * (1 - share) / max(share - first, 1e-9)
                print(f"{state['documents']:,} documents, {tokens:,} tokens, {rate:,.0f} tokens/s, "
                      f"{left // 60:.0f} min {left % 60:.0f} s left", end=end, flush=True)
    except SystemExit:  # from the source
        save(folder, state, pending)
        raise
    if not state["train_tokens"]:
        remove_own_files(folder)
        raise SystemExit(f"error: {state['documents']} documents in {source}: too small for a validation split, which "
                         f"takes the first of every {VAL_EVERY} and leaves the others for training")
    save(folder, state, pending)
    for part in folder.glob("*.bin.part"):
        part.replace(part.with_suffix(""))
    write_json(folder / "meta.json", {**state, "vocab_size": enc.n_vocab, "eot": enc.eot_token})
    (folder / "progress.json").unlink()
    print(f"{folder}: {state['train_tokens']:,} train and {state['val_tokens']:,} val tokens in {state['documents']:,} "
          f"documents ({state['position'] - state['documents']} more were empty, or cut short by the API), "
          f"{(tokens - resumed_at) / (time.monotonic() - began):,.0f} tokens/s")

def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", nargs="+", help="stdlib, fineweb-edu, or text files, .jsonl files, folders of them")
    add("--name", help="folder below --out (default: stdlib or fineweb-edu)")
    add("--out", default="data", help="(default: %(default)s)")
    add("--tokenizer", choices=["gpt2", "bytes"], help="(default: bytes for stdlib, gpt2 otherwise)")
    add("--tokens", type=count, help="stop after so many (default: 400M of fineweb-edu, all of the others)")
    add("--shard_tokens", type=count, default=100_000_000, help="tokens in a full shard (default: 100M)")
    add("--url", default="https://datasets-server.huggingface.co/rows", help="rows API (default: %(default)s)")
    add("--timeout", type=float, default=30, help="seconds that a request may take (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace the data of this name")
    parser.error = lambda message: sys.exit(f"error: {message} (--help says more)")
    try:
        prepare(parser.parse_args(argv))
    except OSError as e:  # a file that is not there, or, with no name, a disk that is full
        raise SystemExit(f"error: {e.filename}: {e.strerror}" if e.filename else f"error: {e.strerror or e}. {RESUME}")

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:  # at any moment: what is on disk is always good
        print(f"\nstopped. {RESUME}", file=sys.stderr, flush=True)
        os._exit(130)  # without waiting for the requests in flight
