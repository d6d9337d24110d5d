"""Joules, from a driver that is played here."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from torchcaps.train.power import joules


class Driver:
    """Counts millijoules for two devices."""

    def __init__(self, fails=""):
        self.fails = fails

    def nvmlInit_v2(self):
        return int(self.fails == "init")

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        handle._obj.value = {b"GPU-first": 1, b"GPU-second": 2}[name]
        return int(self.fails == "handle")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, count):
        count._obj.value = 1500 * handle.value
        return int(self.fails == "count")


@pytest.fixture
def devices(monkeypatch):
    names = ("first", "second")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=names[number]))


def test_devices_add_up(devices, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert joules([0]) == 1.5
    assert joules([1]) == 3.0
    assert joules([0, 1]) == 4.5
    assert joules([]) is None


@pytest.mark.parametrize("step", ["init", "handle", "count"])
def test_a_driver_that_does_not_tell(step, devices, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(step))
    assert joules([0]) is None


def test_no_driver(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert joules([0]) is None
