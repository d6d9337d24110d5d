"""The weights and moments of a run in one piece, whether each process holds all of them or, under FSDP, a part."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchcaps.train.optim import load_moments


class Whole:
    """Each process that holds everything gives what it has."""

    def __init__(self, network: nn.Module, optimizer: Optimizer):
        self.network, self.optimizer = network, optimizer

    def weights(self) -> dict[str, Tensor]:
        return self.network.state_dict()

    def moments(self) -> dict[Any, Any]:
        return self.optimizer.state_dict()["state"]

    def load(self, weights: dict[str, Tensor], moments: dict[Any, Any]) -> None:
        self.network.load_state_dict(weights)
        load_moments(self.optimizer, moments)


class Gathered(Whole):
    """All processes gather the parts. A checkpoint is the same as without: moments go by the parameter's number.

    Args:
        model: the sharded network.
        names: of the trained parameters, in the optimiser's order.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, names: list[str]):
        from torch.distributed.checkpoint import state_dict

        super().__init__(model, optimizer)
        self.names, self.tools = names, state_dict
        self.options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)

    def weights(self) -> dict[str, Tensor]:
        return self.tools.get_model_state_dict(self.network, options=self.options)  # type: ignore[return-value]

    def moments(self) -> dict[Any, Any]:
        found: Any = self._optimizer_state()["state"]
        return {number: found[name] for number, name in enumerate(self.names) if name in found}

    def load(self, weights: dict[str, Tensor], moments: dict[Any, Any]) -> None:
        self.tools.set_model_state_dict(self.network, weights, options=self.options)  # type: ignore[arg-type]
        state = {self.names[number]: value for number, value in moments.items()}
        whole = {"state": state, "param_groups": self._optimizer_state()["param_groups"]}
        self.tools.set_optimizer_state_dict(self.network, self.optimizer, whole, options=self.options)

    def _optimizer_state(self) -> dict[str, Any]:
        return self.tools.get_optimizer_state_dict(self.network, self.optimizer, options=self.options)
