import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # bfloat16 crashes on some CPUs that advertise AMX

import pytest
import torch

from torchcaps.train import prepare

CREATE_MODEL = prepare.create_model


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def presets():
    """Tests may put a network of their own in the place of all presets, for the time of one test."""
    yield
    prepare.create_model = CREATE_MODEL
