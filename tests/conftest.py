import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # bfloat16 crashes on some CPUs that advertise AMX

import pytest
import torch


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
