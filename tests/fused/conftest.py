import pytest
import torch


@pytest.fixture(autouse=True)
def unwritten_is_nan(monkeypatch):
    for where, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        make = getattr(where, name)

        def poisoned(*args, make=make, **options):
            x = make(*args, **options)
            return x.detach().fill_(torch.nan).requires_grad_(x.requires_grad) if x.is_floating_point() else x

        monkeypatch.setattr(where, name, poisoned)
