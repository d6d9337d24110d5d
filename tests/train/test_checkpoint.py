import errno
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from torch import nn

from torchcaps.train import checkpoint
from torchcaps.train.checkpoint import (
    CheckpointError,
    fingerprint,
    latest,
    load,
    load_weights,
    locked,
    save,
    save_weights,
    steps,
)


def example(step):
    generator = torch.Generator().manual_seed(step)
    weights = {"conv.weight": torch.randn(3, 2, generator=generator), "norm.count": torch.tensor(step)}
    state = {
        "optimizer": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.randn(3, 2, generator=generator)}},
        "progress": {"epoch": step // 3, "rows": [{"loss": 0.1 + step, "note": 'a "quoted" é word'}], "best": None},
        "betas": (0.9, 0.999),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(3, generator=generator).to(torch.bfloat16),
    }
    return weights, state


def same(found, step):
    weights, state = example(step)
    return found.step == step and fingerprint([found.weights, found.state]) == fingerprint([weights, state])


def fill(folder, *which, **options):
    for step in which:
        save(folder, step, *example(step), **options)


def test_everything_comes_back(tmp_path):
    fill(tmp_path, 7)
    found = latest(tmp_path)
    assert same(found, 7)
    assert found.state["betas"] == (0.9, 0.999)
    assert isinstance(found.state["progress"]["rows"], list)
    assert found.state["optimizer"][0]["exp_avg"].dtype == torch.float32


def test_nothing_there_is_none(tmp_path):
    assert latest(tmp_path / "never") is None
    assert latest(tmp_path) is None


def test_weights_open_in_any_reader(tmp_path):
    fill(tmp_path, 7)
    with safe_open(tmp_path / "step-00000007.safetensors", "pt") as file:
        assert set(file.keys()) == {"conv.weight", "norm.count"}
        assert torch.equal(file.get_tensor("conv.weight"), example(7)[0]["conv.weight"])


def test_weights_alone(tmp_path):
    save_weights(tmp_path / "new" / "weights.safetensors", example(3)[0], {"recipe": {"lr": 0.1}})
    weights, about = load_weights(tmp_path / "new" / "weights.safetensors")
    assert about == {"recipe": {"lr": 0.1}}
    assert fingerprint(weights) == fingerprint(example(3)[0])


def test_files_are_the_same_each_time(tmp_path):
    fill(tmp_path / "a", 5)
    fill(tmp_path / "b", 5)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_names_that_read_alike_are_kept_apart():
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    tensors, plain = checkpoint.pack(state)
    assert fingerprint(checkpoint.unpack(plain, tensors)) == fingerprint(state)
    assert checkpoint.unpack(plain, tensors)["a"]["b"] == 1


def test_what_cannot_be_kept_is_refused():
    with pytest.raises(TypeError, match=r"a\.b is a set"):
        checkpoint.pack({"a": {"b": {1}}})


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adam,
        torch.optim.AdamW,
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, 0.1),
    ],
    ids=["adam", "adamw", "sgd", "rmsprop"],
)
def test_optimisers_go_on_to_the_bit(make, tmp_path):
    def advance(model, optimizer, first, last):
        for step in range(first, last):
            optimizer.zero_grad()
            model(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()

    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    advance(model, optimizer, 0, 5)
    save(tmp_path, 5, model.state_dict(), optimizer.state_dict())
    advance(model, optimizer, 5, 10)
    again = nn.Linear(3, 2)
    other = make(again.parameters())
    found = latest(tmp_path)
    again.load_state_dict(found.weights)
    other.load_state_dict(found.state)
    advance(again, other, 5, 10)
    assert fingerprint(again.state_dict()) == fingerprint(model.state_dict())
    assert fingerprint(other.state_dict()) == fingerprint(optimizer.state_dict())


def test_a_scalers_state(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13 + 1)
    scaler.scale(torch.ones(()))
    save(tmp_path, 1, {}, scaler.state_dict())
    assert latest(tmp_path).state == scaler.state_dict()


def test_the_previous_is_kept_and_older_ones_go(tmp_path):
    fill(tmp_path, 1, 2, 30, 4)  # going back to 4 means that 30 could not be used
    assert steps(tmp_path) == [2, 4]
    assert len(list(tmp_path.iterdir())) == 4


def test_latest_goes_by_step_not_by_the_clock(tmp_path):
    fill(tmp_path, 9, 10)
    for path in tmp_path.glob("step-00000010*"):
        os.utime(path, (1, 1))
    assert latest(tmp_path).step == 10


def test_beyond_eight_digits(tmp_path):
    fill(tmp_path, 99_999_999, 100_000_000)
    assert latest(tmp_path).step == 100_000_000


def files(folder, step):
    return sorted(folder.glob(f"step-{step:08d}*"))


@pytest.mark.parametrize("which", [0, 1], ids=["weights", "state"])
def test_cut_short_anywhere_falls_back(which, tmp_path):
    fill(tmp_path, 1, 2)
    path = files(tmp_path, 2)[which]
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    notices = []
    for length in [*range(header + 1), *range(header + 1, len(content), 7), len(content) - 1]:
        path.write_bytes(content[:length])
        assert same(latest(tmp_path, notices.append), 1)
    assert all(notice.startswith("the checkpoint of step 2 is passed over: step-00000002") for notice in notices)
    path.unlink()
    assert same(latest(tmp_path, notices.append), 1)
    path.write_bytes(content + b"\0")
    assert same(latest(tmp_path, notices.append), 1)
    path.write_bytes(content)
    assert same(latest(tmp_path), 2)


@pytest.mark.parametrize("which", [0, 1], ids=["weights", "state"])
def test_a_flipped_bit_is_seen(which, tmp_path):
    fill(tmp_path, 1)
    path = files(tmp_path, 1)[which]
    content = path.read_bytes()
    places = torch.randint(8 * len(content), (250,), generator=torch.Generator().manual_seed(which)).tolist()
    for place in [*range(8 * 40), *places]:
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=path.name):
            load(tmp_path, 1)


def test_weights_of_another_run_are_seen(tmp_path):
    fill(tmp_path / "a", 1)
    save(tmp_path / "b", 1, example(2)[0], {})
    files(tmp_path / "b", 1)[0].replace(files(tmp_path / "a", 1)[0])
    with pytest.raises(CheckpointError, match="not the one that its state was saved with"):
        load(tmp_path / "a", 1)


def test_nothing_whole_is_an_error(tmp_path):
    fill(tmp_path, 1, 2)
    for path in tmp_path.iterdir():
        path.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        latest(tmp_path, lambda notice: None)


class Failing:
    """The os module, whose k-th call of one kind fails, or all from there on; a failing write may write a part."""

    def __init__(self, name, k, code, lasting=False):
        self.name, self.left, self.code, self.lasting, self.failed = name, k, code, lasting, False

    def __getattr__(self, name):
        found = getattr(os, name)
        if name != self.name:
            return found

        def call(*args, **options):
            self.left -= 1
            if self.left == 0 or (self.lasting and self.left < 0):
                self.failed = True
                if name == "write":
                    found(args[0], args[1][: len(args[1]) // 2])
                if name == "close":
                    found(*args)
                raise OSError(self.code, os.strerror(self.code))
            return found(*args, **options)

        return call


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
@pytest.mark.parametrize("name", ["open", "write", "fsync", "replace", "close"])
def test_each_failing_call_leaves_a_checkpoint(name, code, lasting, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "CHUNK", 300)
    for k in range(1, 100):
        folder = tmp_path / str(k)
        fill(folder, 1, 2)
        failing = Failing(name, k, code, lasting)
        monkeypatch.setattr(checkpoint, "os", failing)
        if not _fails(folder):
            assert not failing.failed
            break
        monkeypatch.setattr(checkpoint, "os", os)
        assert failing.failed
        found = latest(folder)
        assert same(found, found.step)
        assert found.step in (2, 3)  # 3 where only the last call of all failed
        fill(folder, 3)
        assert same(latest(folder), 3)
        assert same(load(folder, 2), 2)
        assert len(list(folder.iterdir())) == 4
    assert k > 1


def _fails(folder):
    try:
        fill(folder, 3)
    except OSError:
        return True
    return False


def test_a_failing_clean_up_does_not_matter(tmp_path, monkeypatch):
    fill(tmp_path, 1, 2)

    def fail(path, **options):
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr("pathlib.Path.unlink", fail)
    fill(tmp_path, 3)
    assert same(latest(tmp_path), 3)


def test_a_second_process_is_refused(tmp_path):
    child = "from torchcaps.train.checkpoint import locked\nwith locked(pathlib.Path(sys.argv[1])): pass"
    command = [sys.executable, "-c", f"import sys, pathlib\n{child}", str(tmp_path)]
    with locked(tmp_path):
        refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "another process is at work in" in refused.stderr
    assert subprocess.run(command).returncode == 0


def test_a_lock_takes_away_only_folders_made_for_it(tmp_path):
    with locked(tmp_path / "new" / "run"):
        pass
    assert not (tmp_path / "new").exists()
    with locked(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]  # others may wait for it
