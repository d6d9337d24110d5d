import pytest
import torch


@pytest.fixture(autouse=True)
def unwritten_is_nan(monkeypatch):
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)

        def poisoned(*args, make=make, **options):
            x = make(*args, **options)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        monkeypatch.setattr(torch, name, poisoned)
