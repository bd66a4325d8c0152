"""prepare_data.py: text to shards, and shards to batches.

Each test holds it against an authority outside it: the bytes of the text and the rule for the
splits written out by hand, tiktoken, a server that misbehaves, a run that was never stopped.
"""
import email.utils
import gzip
import http.server
import itertools
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import numpy as np
import pytest

import prepare_data
from prepare_data import Tokens, claim, read_meta

SCRIPT = prepare_data.__file__
needs_gpt2 = pytest.mark.skipif(not os.environ.get("TIKTOKEN_CACHE_DIR"),
                                reason="needs a TIKTOKEN_CACHE_DIR with gpt2")
both_tokenizers = pytest.mark.parametrize("tokenizer",
                                          ["bytes", pytest.param("gpt2", marks=needs_gpt2)])


def prepare(out, *source, tokenizer="bytes"):
    prepare_data.main([*map(str, source), "--out", str(out), "--tokenizer", tokenizer])


def exits(call, *args, said):
    """The call ends in one line, an error that says all of these."""
    with pytest.raises(SystemExit) as stop:
        call(*args)
    line = str(stop.value)
    assert line.startswith("error: ") and "\n" not in line, line
    assert all(word in line for word in said), line


def refused(out, *source, said):
    exits(prepare, out, *source, said=said)


def tokens_in(folder):
    shards = {split: sorted(folder.glob(split + "_*.bin")) for split in ("train", "val")}
    return {split: np.concatenate([np.fromfile(f, "<u2") for f in files]).tolist()
            for split, files in shards.items()}


def files_in(folder):
    return {f.name: f.read_bytes() for f in folder.iterdir()}


def by_hand(texts):
    """The rule written out: bytes, each document after a 256, documents 0, 50, ... validation."""
    splits = {"train": [], "val": []}
    for i, text in enumerate(texts):
        splits["val" if i % 50 == 0 else "train"] += [256, *text.encode("utf-8")]
    return splits


def text_of(i):
    return f"row {i}: <|endoftext|> gr\u00fc\u00dfe \U0001f600\r\n" + "words and words " * (i % 7)


def jsonl(texts):
    lines = [json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)]
    return "".join(lines).encode()


# --- Text -> tokens -------------------------------------------------------------------------------

def test_data_tokens_are_the_documents_in_their_splits_and_shards(tmp_path):
    texts = [text_of(i) for i in range(120)]
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl.xz", "c.jsonl.gz")]
    files[0].write_bytes(jsonl(texts[:30]))
    files[1].write_bytes(lzma.compress(jsonl(texts[30:70] + [""])))
    files[2].write_bytes(gzip.compress(jsonl(texts[70:])))
    prepare(tmp_path, *files, "--name", "mine", "--shard_tokens", "1k")
    folder = tmp_path / "mine"
    wanted, meta = by_hand(texts), json.loads((folder / "meta.json").read_text())
    assert tokens_in(folder) == wanted
    for split in wanted:
        n = len(wanted[split])
        sizes = [f.stat().st_size for f in sorted(folder.glob(split + "_*.bin"))]
        assert sizes == [2000] * (n // 1000) + [n % 1000 * 2] and meta[split + "_tokens"] == n
    about = (meta["tokenizer"], meta["vocab_size"], meta["eot"], meta["documents"])
    assert about == ("bytes", 257, 256, 120)
    assert meta["validation"] == "every 50th document, the first among them"
    assert [f.name for f in folder.iterdir() if f.suffix != ".bin"] == ["meta.json"]
    # Of fewer tokens, the first documents, none cut, each in the split where it was.
    prepare(tmp_path, *files, "--name", "few", "--tokens", "4k")
    n = json.loads((tmp_path / "few" / "meta.json").read_text())["documents"]
    assert tokens_in(tmp_path / "few") == by_hand(texts[:n])
    sizes = [1 + len(t.encode()) for t in texts]
    assert sum(sizes[:n]) >= 4000 > sum(sizes[:n - 1])


def test_data_a_long_text_is_cut_after_line_ends(tmp_path):
    text = "".join(f"line {i} \u00e9\r\n" for i in range(20_000)) + "\U0001f600" * 70_000 + "\nend"
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "b.txt").write_bytes(text.encode())
    (tmp_path / "in" / "a.md").write_text("first")
    prepare(tmp_path, tmp_path / "in", "--name", "d")
    splits = tokens_in(tmp_path / "d")
    # 255 is in no UTF-8 text
    pieces = bytes(min(token, 255) for token in splits["train"]).split(b"\xff")[1:]
    assert splits["val"] == [256, *b"first"] and b"".join(pieces) == text.encode()
    assert max(len(piece.decode()) for piece in pieces[:4]) <= 65536
    assert all(p.endswith(b"\n") for p in pieces[:4])
    assert 60_000 < len(pieces[0]) and splits["train"].count(256) == len(pieces) < 12


def test_data_stdlib(tmp_path):
    prepare(tmp_path, "stdlib", "--tokens", "2M")
    first = Path(sysconfig.get_paths()["stdlib"], "__future__.py").read_bytes()
    assert bytes(tokens_in(tmp_path / "stdlib")["val"][1:len(first) + 1]) == first


@needs_gpt2
def test_data_gpt2_tokens_are_tiktokens(tmp_path):
    enc = prepare_data.get_tokenizer("gpt2")
    texts = [text_of(i) for i in range(60)] + ["half a pair: \ud83d", " " * 100_000]
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    prepare(tmp_path, tmp_path / "a.jsonl", "--name", "d", tokenizer="gpt2")
    wanted = {"train": [], "val": []}
    for i, text in enumerate(texts):
        wanted["val" if i in (0, 50) else "train"] += [50256, *enc.encode_ordinary(text)]
    assert tokens_in(tmp_path / "d") == wanted


def test_data_gpt2_without_network_says_what_to_do(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    env = {**os.environ, **dict.fromkeys(names, "http://127.0.0.1:9"),
           "TIKTOKEN_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, SCRIPT, "a.txt", "--name", "d"], cwd=tmp_path, env=env,
                          capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    for word in ("stdlib", "TIKTOKEN_CACHE_DIR", "--tokenizer bytes"):
        assert word in done.stderr


@both_tokenizers
def test_data_a_byte_order_mark_at_the_start_of_a_file_is_no_text(tmp_path, tokenizer):
    long_line = "\u00e9" * 70_000  # so that it would be cut elsewhere, were the mark a part of it
    text = (long_line + "\nline\r\n" * 9).encode()
    many = [(f"{i:02d}.txt", f"text {i}".encode()) for i in range(48)]
    files = [*many, ("a.md", text), ("b.py", b"import this\n"), ("c.txt", text), ("e.txt", b""),
             ("d.jsonl", jsonl(["\ufeffa mark in JSON is text", "one"])),
             ("f.txt", b"a\xef\xbb\xbfb"),
             *((f"{name}{ending}", content) for ending in (".xz", ".gz")
               for name, content in (("g.txt", text), ("h.jsonl", jsonl(["packed", "lines"]))))]
    for folder, mark in (("without", b""), ("with", b"\xef\xbb\xbf")):
        (tmp_path / folder).mkdir()
        for name, content in files:
            pack = {".xz": lzma.compress, ".gz": gzip.compress}.get(Path(name).suffix, bytes)
            (tmp_path / folder / name).write_bytes(pack(mark + content))
        prepare(tmp_path, tmp_path / folder, "--name", f"{folder}-it", tokenizer=tokenizer)
    shards = [{name: content for name, content in files_in(tmp_path / f"{folder}-it").items()
               if name != "meta.json"} for folder in ("without", "with")]
    assert shards[0] == shards[1] and len(shards[0]) == 2
    if tokenizer == "bytes":  # the marks that are text stay
        text = bytes(min(token, 255) for token in tokens_in(tmp_path / "with-it")["train"])
        assert text.count(b"\xef\xbb\xbf") == 2
        assert b"\xff\xef\xbb\xbfa mark in JSON is text\xff" in text and b"a\xef\xbb\xbfb" in text


def test_data_a_byte_order_mark_in_the_standard_library(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    for i in range(3):
        (tmp_path / "lib" / f"{i}.py").write_bytes(b"\xef\xbb\xbf" * (i == 1) + b"pass  # %d\n" % i)
    monkeypatch.setattr(prepare_data.sysconfig, "get_paths", lambda: {"stdlib": tmp_path / "lib"})
    prepare(tmp_path, "stdlib")
    assert tokens_in(tmp_path / "stdlib") == by_hand(f"pass  # {i}\n" for i in range(3))


# --- Little text ----------------------------------------------------------------------------------

LAST_TENTH = "the last tenth of the tokens"


@both_tokenizers
def test_data_of_one_file_of_20_KB_the_last_tenth_is_held_out(tmp_path, tokenizer):
    text = "".join(f"Line {i} of a learner's first text.\n" for i in range(600))[:20_000]
    (tmp_path / "small.txt").write_text(text)
    command = [tmp_path, tmp_path / "small.txt", "--name", "d"]
    prepare(*command, tokenizer=tokenizer)
    enc = prepare_data.get_tokenizer(tokenizer)
    ids, splits = [enc.eot_token, *enc.encode_ordinary(text)], tokens_in(tmp_path / "d")
    assert splits["train"] + splits["val"] == ids and len(splits["val"]) == len(ids) // 10
    meta = read_meta(tmp_path / "d")
    assert meta["validation"] == LAST_TENTH and meta["documents"] == 1
    assert (meta["train_tokens"], meta["val_tokens"]) == tuple(map(len, splits.values()))
    for split in splits:
        assert Tokens(tmp_path / "d", split, 64, enc.n_vocab).batch(0, 0, 0, 8).shape == (8, 65)
    before = files_in(tmp_path / "d")
    prepare(*command, tokenizer=tokenizer)  # is there already
    assert files_in(tmp_path / "d") == before
    prepare(*command, "--overwrite", tokenizer=tokenizer)
    assert files_in(tmp_path / "d") == before


def test_data_the_last_tenth_is_for_where_the_first_document_is_most_of_it(tmp_path):
    def prepared(*texts):
        (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
        prepare(tmp_path, tmp_path / "a.jsonl", "--name", "d", "--overwrite")
        return tokens_in(tmp_path / "d"), read_meta(tmp_path / "d")["validation"]

    for texts in (["a" * 1000] * 3, ["a" * 1000] * 2, ["a" * 99] * 49, ["a" * 99] * 50, ["a"] * 51,
                  ["a" * 1000, *"b" * 50]):
        assert prepared(*texts) == (by_hand(texts), "every 50th document, the first among them")
    for texts in (["a" * 1000], ["a" * 1000, "b" * 900, "c"], ["a" * 9999, *"b" * 49]):
        splits, rule = prepared(*texts)
        tokens = [token for text in texts for token in [256, *text.encode()]]
        at = len(tokens) - len(tokens) // 10
        assert splits == {"train": tokens[:at], "val": tokens[at:]} and rule == LAST_TENTH
    # A text file just over the length of a document would have most of it held out otherwise.
    (tmp_path / "b.txt").write_text("words\n" * 15_000)
    prepare(tmp_path, tmp_path / "b.txt", "--name", "b")
    assert read_meta(tmp_path / "b")["val_tokens"] == (90_000 + 2) // 10


class Killed(BaseException):
    pass


def test_data_of_one_file_killed_at_any_write_and_resumed(tmp_path, monkeypatch):
    (tmp_path / "small.txt").write_text("".join(f"line {i}\n" for i in range(2000)))
    write, room = prepare_data.write, [-1]

    def write_until_killed(path, data, at=0):
        room[0] -= 1
        write(path, data if room[0] else data[:len(data) // 2], at)
        if not room[0]:
            raise Killed

    monkeypatch.setattr(prepare_data, "write", write_until_killed)
    monkeypatch.setattr(prepare_data, "SAVE_EVERY", -1)
    command = [tmp_path / "small.txt", "--name", "d", "--shard_tokens", "5k"]
    prepare(tmp_path / "undisturbed", *command)
    for n in itertools.count(1):
        room[0] = n
        try:
            prepare(tmp_path / str(n), *command)
            break
        except Killed:
            room[0] = -1
            prepare(tmp_path / str(n), *command)
            assert files_in(tmp_path / str(n) / "d") == files_in(tmp_path / "undisturbed" / "d")
    assert n > 6  # five shards, progress.json, which becomes meta.json


@pytest.mark.parametrize("text", ["", "one", "0123456789"])
def test_data_too_little_for_any_sequence_is_said_in_one_line(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    said = [f"{bool(text):d} documents", "a.txt", "too small", "more text"]
    refused(tmp_path, tmp_path / "a.txt", "--name", "d", said=said)
    assert not list((tmp_path / "d").glob("*.*"))
    (tmp_path / "a.txt").write_text("a text of twenty bytes")
    prepare(tmp_path, tmp_path / "a.txt", "--name", "d")
    assert len(tokens_in(tmp_path / "d")["val"]) == 2


def test_data_of_before_the_last_tenth(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["a" * 1000, "b"]))
    command = [tmp_path, tmp_path / "a.jsonl", "--name", "d", "--shard_tokens", "300"]
    prepare(*command)
    meta, anew = json.loads((tmp_path / "d" / "meta.json").read_text()), files_in(tmp_path / "d")
    # All made, by the rule there was: stays as it is, and is read.
    for shard in (tmp_path / "d").glob("*.bin"):
        shard.unlink()
    old = {**meta, "train_tokens": 2, "val_tokens": 1001}
    del old["validation"]
    np.array([256, 98], "<u2").tofile(tmp_path / "d" / "train_000000.bin")
    for i, size in enumerate((300, 300, 300, 101)):
        np.full(size, 97, "<u2").tofile(tmp_path / "d" / f"val_{i:06d}.bin")
    (tmp_path / "d" / "meta.json").write_text(json.dumps(old))
    before = files_in(tmp_path / "d")
    prepare(*command)
    assert files_in(tmp_path / "d") == before and read_meta(tmp_path / "d") == old
    # Stopped after the first document, which was saved: the few documents are read again.
    (tmp_path / "d" / "meta.json").unlink()
    (tmp_path / "d" / "train_000000.bin").unlink()
    old.update(position=1, documents=1, train_tokens=0)
    (tmp_path / "d" / "progress.json").write_text(json.dumps(old))
    prepare(*command)
    assert files_in(tmp_path / "d") == anew


# --- The rows API ---------------------------------------------------------------------------------

class Rows(http.server.BaseHTTPRequestHandler):
    """The rows API. server.faults: what the first answers are instead of good ones, by offset."""
    def do_GET(self):
        query, server = parse_qs(urlparse(self.path).query), self.server
        first, length = int(query["offset"][0]), int(query["length"][0])
        server.asked.append((first, time.monotonic()))
        assert self.headers["Authorization"] == server.token and length <= 100
        assert query["config"] == ["sample-10BT"]
        fault = server.faults[first].pop(0) if server.faults.get(first) else None
        time.sleep(2 if fault == "slow" else server.delay)
        rows = [{"row_idx": i, "row": {"text": text_of(i)},
                 "truncated_cells": ["text"] * (i in server.truncated)}
                for i in range(first + (fault == "other rows"), min(first + length, server.total))]
        answer = {"rows": rows, "num_rows_total": server.total, "partial": False}
        body = json.dumps(answer).encode()
        body = {"malformed": body[:-9], "other shape": b"[1]"}.get(fault, body)
        status = fault if isinstance(fault, int) else 429 if "wait" in str(fault) else 200
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if "wait" in str(fault):
            until = email.utils.formatdate(time.time() + 2, usegmt=True)
            after = {"wait": "1", "wait 1.5": "1.5"}.get(fault, until)  # 1.5: not what HTTP allows
            self.send_header("Retry-After", after)
        self.end_headers()
        self.wfile.write(body[:40] if fault == "cut short" else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr(prepare_data, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(prepare_data, "LONGEST_WAIT", 0.02)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Rows)
    server.handle_error = lambda *_: None  # a client that hangs up is part of the tests
    server.faults, server.asked, server.truncated = {}, [], ()
    server.delay, server.total, server.token = 0, 1234, None
    url = f"http://127.0.0.1:{server.server_port}/rows"
    server.source = ["fineweb-edu", "--url", url, "--timeout", "0.5"]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_data_rows_api_on_a_bad_day(tmp_path, api, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    api.token = "Bearer secret"
    api.faults = {0: [500, "malformed"], 100: ["wait"], 200: ["wait until"], 300: ["slow"],
                  400: ["cut short", 503], 600: ["other rows"], 700: ["other shape"],
                  1100: ["wait 1.5"], 1200: ["cut short"]}
    api.truncated = (50, 777)  # these two are not whole, and so not documents
    prepare(tmp_path, *api.source, "--shard_tokens", "5k")
    assert not any(api.faults.values())
    whole = (text_of(i) for i in range(1234) if i not in api.truncated)
    assert tokens_in(tmp_path / "fineweb-edu") == by_hand(whole)
    for offset in (100, 200):
        refused_at, asked_again = [when for first, when in api.asked if first == offset]
        # as Retry-After said, in seconds or, with no fractions of them, as a date
        assert asked_again - refused_at >= 1
    # nobody waited for the slow answer
    assert len([first for first, _ in api.asked if first == 300]) == 2


def test_data_rows_api_that_fails_for_good(tmp_path, api):
    for status in (401, 403, 404):
        api.faults = {0: [status]}
        refused(tmp_path, *api.source, said=[str(status), "HF_TOKEN"])
    assert len(api.asked) == 3  # asking again would not help
    api.faults = {300: [500] * prepare_data.TRIES}
    refused(tmp_path, *api.source, said=["row 300", "500", "same command"])
    assert not any(api.faults.values())
    api.asked.clear()
    prepare(tmp_path, *api.source)
    assert min(first for first, _ in api.asked) == 300  # what came before the failure is kept
    assert tokens_in(tmp_path / "fineweb-edu") == by_hand(map(text_of, range(1234)))
    nobody = ["fineweb-edu", "--url", "http://127.0.0.1:9/rows"]
    refused(tmp_path / "new", *nobody, said=["stdlib", "TIKTOKEN_CACHE_DIR"])


# --- Stopped, full, damaged, in use ---------------------------------------------------------------

@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_data_stopped_and_resumed_is_as_never_stopped(tmp_path, api, number):
    api.total, api.delay, folder = 8000, 0.2, tmp_path / "fineweb-edu"  # two seconds
    more = ["--shard_tokens", "20k"]
    saves_often, n = re.subn(r"(?m)^SAVE_EVERY = \S+", "SAVE_EVERY = 0.1", Path(SCRIPT).read_text())
    (tmp_path / "script.py").write_text(saves_often)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py", *api.source, *more, "--out", tmp_path,
         "--tokenizer", "bytes"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (folder / "train_000001.bin").exists():
        time.sleep(0.01)
    for overwrite in ([], ["--overwrite"]):
        refused(tmp_path, *api.source, *more, *overwrite, said=[str(folder), "in use by another"])
    process.send_signal(number)
    said = process.communicate()[1]
    assert n == 1 and process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 130}[number]
    if number == signal.SIGTERM:
        assert "resumes" in said and "Traceback" not in said
    finished = {f: f.stat().st_mtime_ns for f in folder.glob("*.bin")}
    rows_in_them = sum(np.fromfile(f, "<u2").tolist().count(256) for f in finished)
    said = ["tokens", "1000000", "--overwrite"]
    refused(tmp_path, *api.source, *more, "--tokens", "1M", said=said)
    api.delay, api.asked = 0, []
    prepare(tmp_path, *api.source, *more)
    assert min(first for first, _ in api.asked) >= rows_in_them - 1 > 100
    assert not list(folder.glob("*.part"))
    assert all(f.stat().st_mtime_ns == then for f, then in finished.items())
    assert tokens_in(folder) == by_hand(map(text_of, range(8000)))
    prepare(tmp_path / "undisturbed", *api.source, *more)
    assert files_in(folder) == files_in(tmp_path / "undisturbed" / "fineweb-edu")


def test_data_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(jsonl(map(text_of, range(200))))
    monkeypatch.setattr(prepare_data, "SAVE_EVERY", -1)  # after each document
    monkeypatch.setattr(prepare_data.os, "fsync", lambda _: None)  # which makes no other files
    room, write = [0], prepare_data.write

    def write_while_there_is_room(path, data, at=0):
        room[0] -= 1
        write(path, data if room[0] else data[:len(data) // 2], at)
        if not room[0]:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare_data, "write", write_while_there_is_room)
    command = [tmp_path, tmp_path / "a.jsonl", "--name", "d", "--shard_tokens", "1k"]
    for room[0] in (100, 101, 102):  # full while writing tokens, and while writing progress.json
        refused(*command, said=["No space left", "same command"])
        assert not list((tmp_path / "d").glob("*.tmp"))
    room[0] = -1
    prepare(*command)
    assert tokens_in(tmp_path / "d") == by_hand(map(text_of, range(200)))


@pytest.mark.parametrize("name, content, said", [
    ("a.txt", b"x" * 70_000 + b"\xff" + b"y" * 9, ["a.txt", "UTF-8", "70000", "iconv"]),
    ("a.txt", b"\xef\xbb\xbf" + b"x" * 70_000 + b"\xff", ["a.txt", "UTF-8", "(byte 70003)"]),
    ("a.txt", b"\xef\xbb\xbf\n\xff", ["UTF-8", "(byte 4)"]),
    ("a.txt", b"caf\xc3", ["UTF-8", "3"]),
    ("a.txt", b"\xef\xbb", ["UTF-8", "(byte 0)"]),
    ("a.txt", "text".encode("utf-16"), ["a.txt", "(byte 0)", "iconv -f UTF-16 -t UTF-8"]),
    ("a.txt", b"\xfe\xff\0t\0e", ["(byte 0)", "iconv -f UTF-16 -t UTF-8"]),
    ("a.jsonl", jsonl("a").decode().encode("utf-16"), ["(byte 0)", "iconv -f UTF-16 -t UTF-8"]),
    ("a.jsonl", jsonl("a") + b'{"text": "\xe9"}', ["UTF-8", "33"]),
    ("a.jsonl", b"\xef\xbb\xbf" + jsonl("a") + b'{"text": "\xe9"}', ["UTF-8", "(byte 36)"]),
    ("a.jsonl", jsonl("abc") + b"{bad\n", ["a.jsonl", "line 4"]),
    ("a.jsonl", jsonl("a") + b'{"txt": 1}', ["line 2", "text"]),
    ("a.jsonl", jsonl("a") + b'{"text": null}', ["line 2", "text"]),
    ("a.txt.xz", lzma.compress(b"text" * 999)[:-20], ["a.txt.xz"]),
    ("a.txt.gz", b"not gzip", ["a.txt.gz"]),
    ("a.txt", b"", ["0 documents"]),
    ("a.txt", b"one", ["1 documents", "validation"]),
    ("none.txt", None, ["none.txt", "No such file"])])
def test_data_bad_input_is_one_clear_line(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    refused(tmp_path, tmp_path / name, "--name", "d", said=said)
    assert not (tmp_path / "d" / "meta.json").exists()


def test_data_that_is_there_is_never_lost(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(map(text_of, range(99))))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "notes.txt").write_text("not of prepare_data")
    command = [tmp_path, tmp_path / "a.jsonl", "--name", "d"]

    def state():
        return {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in (tmp_path / "d").iterdir()}

    prepare(*command)
    before = state()
    prepare(*command)  # the same: nothing to do
    refused(*command, "--shard_tokens", "1000", said=["shard_tokens", "1000", "--overwrite"])
    assert state() == before
    (tmp_path / "d" / "meta.json").unlink()
    refused(*command, said=["--overwrite"])
    prepare(*command, "--shard_tokens", "1000", "--overwrite")
    assert tokens_in(tmp_path / "d") == by_hand(map(text_of, range(99))) and "notes.txt" in state()
    refused(tmp_path, tmp_path / "a.jsonl", said=["--name"])
    refused(tmp_path, "stdlib", "--tokens", "many", said=["many"])


def test_data_that_is_not_whole_is_said_so(tmp_path):
    lines = b"\n \n".join(jsonl([text_of(i)]) for i in range(99))  # blank lines are none
    (tmp_path / "a.jsonl").write_bytes(b"\n" + lines)
    command = [tmp_path, tmp_path / "a.jsonl", "--name", "d", "--shard_tokens", "1000"]
    prepare(*command)
    assert tokens_in(tmp_path / "d") == by_hand(map(text_of, range(99)))
    meta, shard = tmp_path / "d" / "meta.json", tmp_path / "d" / "train_000001.bin"
    tokens, about = shard.read_bytes(), meta.read_bytes()
    shard.unlink()
    refused(*command, said=["train tokens", "--overwrite"])
    meta.rename(tmp_path / "d" / "progress.json")  # nor does a run go on where a shard is gone
    refused(*command, said=["train tokens", "--overwrite"])
    (tmp_path / "d" / "progress.json").rename(meta)
    shard.write_bytes(tokens)
    prepare(*command)
    for damaged in (b"", b"[]", b"null", about.replace(b'"position"', b'"other"')):
        meta.write_bytes(damaged)
        refused(*command, said=["meta.json is damaged", "--overwrite"])


def test_data_a_failed_first_try_is_no_obstacle(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"{bad")
    refused(tmp_path, tmp_path / "a.jsonl", "--name", "d", said=["line 1"])
    (tmp_path / "a.jsonl").write_bytes(jsonl(map(text_of, range(99))))
    prepare(tmp_path, tmp_path / "a.jsonl", "--name", "d")
    assert tokens_in(tmp_path / "d") == by_hand(map(text_of, range(99)))
    for name in ("../d", "..", ".", "a/b"):
        refused(tmp_path, tmp_path / "a.jsonl", "--name", name, said=["--name"])
    (tmp_path / "empty").mkdir()
    refused(tmp_path, tmp_path / "empty", "--name", "e", said=["empty", ".txt"])


def test_a_lock_holds_while_its_file_is_open_or_its_process_lives(tmp_path, monkeypatch):
    other = ("import sys, prepare_data\nwith open(sys.argv[1], 'a') as file:\n"
             "    prepare_data.claim(file, 'it')\n    print('locked', flush=True)\n    input()")
    process = subprocess.Popen([sys.executable, "-c", other, tmp_path / "f"], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, cwd=Path(SCRIPT).parent)
    assert process.stdout.readline() == b"locked\n"
    with open(tmp_path / "f", "a") as file:
        exits(claim, file, "this folder", said=["error: this folder is in use by another process"])
        process.kill()
        process.communicate()
        claim(file, "this folder")
        with open(tmp_path / "f", "a") as again:
            exits(claim, again, "it", said=["it is in use by another process"])
            monkeypatch.setattr(prepare_data, "fcntl", None)
            claim(again, "it")  # a system without locks
    monkeypatch.undo()
    with open(tmp_path / "f", "a") as file:
        claim(file, "it")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_data_names_that_the_terminal_cannot_show_are_no_obstacle(tmp_path, encoding):
    name = os.fsdecode("\u00fc\udcff".encode("utf-8", "surrogateescape"))  # the last is no UTF-8
    (tmp_path / f"{name}.txt").write_text("words " * 99)
    (tmp_path / f"{name}.jsonl").write_text("{")
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    for suffix, code in ((".txt", 0), (".txt", 0), (".jsonl", 1), (".none", 1)):
        done = subprocess.run([sys.executable, SCRIPT, name + suffix, "--name", name + suffix,
                               "--tokenizer", "bytes"], cwd=tmp_path, env=env, capture_output=True)
        assert done.returncode == code and b"Traceback" not in done.stderr, done.stderr
        assert b"\\udcff" in (done.stderr if code else done.stdout)


# --- Shards -> batches ----------------------------------------------------------------------------

def make_data(folder, train_tokens=5000, val_tokens=500, seed=0):
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    for split, n in (("train", train_tokens), ("val", val_tokens)):
        ids = rng.integers(257, size=n).astype("<u2")
        ids[:n // 3].tofile(folder / f"{split}_000000.bin")
        ids[n // 3:].tofile(folder / f"{split}_000001.bin")
    meta = dict(tokenizer="bytes", vocab_size=257, eot=256, train_tokens=train_tokens,
                val_tokens=val_tokens)
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def test_batches_are_a_function_of_seed_stream_and_number_only(tmp_path):
    data = make_data(tmp_path / "data [1]")
    tokens = Tokens(data, "train", 16, 257)
    shards = [np.fromfile(path, "<u2") for path in sorted(data.glob("train*"))]
    windows = np.array([shard[i:i + 17] for shard in shards for i in range(len(shard) - 16)])
    again = Tokens(str(data), "train", 16, 257)
    again.batch(1, 0, 99, 4)
    numbers = [(seed, stream, k) for seed in (1, 2) for stream in (0, 1) for k in (0, 1)]
    seen = [tokens.batch(*number, 64) for number in numbers]
    assert np.array_equal(tokens.batch(1, 0, 0, 64), again.batch(1, 0, 0, 64))
    assert seen[0].dtype == np.int64 and seen[0].shape == (64, 17)
    assert all(not np.array_equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    for number, batch in zip(numbers, seen):  # each window as likely as any other, over all shards
        at = np.random.default_rng(number).integers(len(windows), size=64)
        assert np.array_equal(batch, windows[at])


def test_a_shard_shorter_than_a_sequence_or_empty_is_passed_over(tmp_path):
    data = make_data(tmp_path / "data")
    for i, n in ((2, 5), (3, 0), (4, 17)):
        np.full(n, 200 + i, "<u2").tofile(data / f"train_{i:06d}.bin")
    tokens, last = Tokens(data, "train", 16, 257), np.full(17, 204)
    assert list(tokens.ends) == [1650, 4968, 4968, 4969]
    batch = np.concatenate([tokens.batch(0, 0, k, 5000) for k in range(3)])
    assert not np.any(np.all(batch == 202, axis=1)) and np.any(np.all(batch == last, axis=1))
    for path in data.glob("train_*"):
        if path.name != "train_000004.bin":
            path.unlink()
    assert np.array_equal(Tokens(data, "train", 16, 257).batch(0, 0, 0, 2), [last, last])
    said = ["the train split", "shorter than one sequence of 18 tokens"]
    exits(Tokens, data, "train", 17, 257, said=said)


def test_data_that_cannot_be_trained_on_is_one_clear_line(tmp_path):
    said = ["no data in", "meta.json", "prepare_data.py"]
    exits(read_meta, tmp_path / "none", said=[*said, "--help"])
    exits(read_meta, f"{tmp_path}/data/stdlib/", said=[*said, "prepare_data.py stdlib"])
    data = make_data(tmp_path / "data")
    exits(read_meta, data / "train_000000.bin", said=said)
    assert read_meta(str(data)) == json.loads((data / "meta.json").read_text())
    with open(data / "train_000001.bin", "ab") as file:
        file.write(b"x")
    said = ["train_000001.bin has an odd number", "--overwrite"]
    exits(Tokens, data, "train", 16, 257, said=said)
    np.array([300] * 3334, "<u2").tofile(data / "train_000001.bin")
    said = ["train_000001.bin holds the token 300", "257", "--overwrite"]
    exits(Tokens, data, "train", 16, 257, said=said)
    exits(Tokens, data, "train", 16, 300, said=["the token 300", "vocabulary of 300"])
    Tokens(data, "train", 16, 301)
    os.truncate(data / "train_000001.bin", 5668)
    said = ["holds 4,500 of 5,000 train tokens", "--overwrite"]
    exits(read_meta, data, said=said)
    about = (data / "meta.json").read_bytes()
    (data / "meta.json").write_bytes(about.replace(b"5000", b"4500"))
    assert read_meta(data)["train_tokens"] == 4500
    for damaged in (b"", b"[]", b"{}", b"\xff", about.replace(b"257", b'"?"'),
                    about.replace(b"5000", b"Infinity"), about.replace(b"vocab_size", b"other")):
        (data / "meta.json").write_bytes(damaged)
        exits(read_meta, data, said=["meta.json is damaged", "--overwrite"])
    short = make_data(tmp_path / "short", val_tokens=20)
    said = ["the val split", "shorter than one sequence of 17", "--block_size"]
    exits(Tokens, short, "val", 16, 257, said=said)
    exits(Tokens, tmp_path, "val", 16, 257, said=said)
