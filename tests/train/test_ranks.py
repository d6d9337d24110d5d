"""Two processes of which one is lost, without a launcher that would end the other."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.train.test_train import RECIPE, ROOT, tiny
from torchcaps.train import ranks as ranks_module
from torchcaps.train.ranks import Ranks

WAYS = {
    "is lost": "rank 1 was lost at step 3; the checkpoint of step 3 is intact",
    "is lost while the other does not look": "rank 1 was lost at step 3; the checkpoint of step 3 is intact",
    "fails": "rank 1 stopped: something is wrong with me at step 3; the checkpoint of step 3 is intact",
}


def a_rank(rank, folder, how):
    """One of two ranks, of which rank 1 comes to grief at step 3."""
    torch.set_num_threads(1)
    module = sys.modules["torchcaps.train.step"]
    before, calls = module.set_rates, []

    def set_rates(*args):
        calls.append(1)
        if len(calls) == 4 and rank == 1:
            if how == "fails":
                raise ValueError("something is wrong with me")
            os.kill(os.getpid(), signal.SIGKILL)
        if len(calls) == 4 and how == "is lost while the other does not look":
            ranks_module.PATIENCE = 1.0
            time.sleep(60)
        return before(*args)

    module.set_rates = set_rates
    tiny(replace(RECIPE, model_args={"dropout": 0.0}, epochs=2), folder, save_every=0)


def two_ranks(folder, how, port):
    """Gives how rank 0 ended, how long after rank 1, and what it said. Run in a fresh process, which forks."""
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            with (folder / f"said-{rank}").open("w") as said:
                os.dup2(said.fileno(), 2)
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GROUP_RANK": "0"}
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
            os.environ["TORCHELASTIC_RUN_ID"] = "none"
            try:
                a_rank(rank, folder / "run", how)
            except BaseException as error:
                print(error, file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(child)
    os.waitpid(children[1], 0)
    began = time.monotonic()
    _, status = os.waitpid(children[0], 0)
    return os.waitstatus_to_exitcode(status), time.monotonic() - began, (folder / "said-0").read_text()


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with ExitStack() as stack:
        ports = [stack.enter_context(socket.socket()) for _ in WAYS]
        for each in ports:
            each.bind(("127.0.0.1", 0))
        numbers = [each.getsockname()[1] for each in ports]
    for way in WAYS:
        (folder / way).mkdir()
    call = (
        "import json, pathlib, tests.train.test_ranks as t\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        f"ends = {{way: t.two_ranks(folder / way, way, port) for way, port in zip(t.WAYS, {numbers}, strict=True)}}\n"
        "print(json.dumps(ends))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", call], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_comes_to_grief_is_named(way, ends):
    code, seconds, said = ends[way]
    assert code > 0
    assert WAYS[way] in said
    assert seconds < 30


class Pair:
    """Stands for Fabric in one of two processes, the other of which is not there."""

    global_rank, world_size = 0, 2

    def broadcast(self, value):
        return value

    def barrier(self):
        pass


def test_locks_that_tell_nothing_are_not_asked(tmp_path, monkeypatch):
    def touch_both(path, **options):
        for rank in range(2):
            path.with_name(str(rank)).write_text("")

    monkeypatch.setattr(Path, "touch", touch_both)
    ranks = Ranks(Pair(), tmp_path)
    with ranks.watched(lambda: ""):
        assert ranks.lost() == [1]
        assert not ranks.told
    with pytest.raises(RuntimeError, match="of another kind"), Ranks(Pair(), tmp_path).watched(lambda: ""):
        raise RuntimeError("of another kind")


def test_one_process_leaves_nothing_behind(tmp_path):
    tiny(replace(RECIPE, epochs=1), tmp_path)
    assert not list(tmp_path.glob(".ranks*"))
