"""Modules and objects with state that is not a tensor. They have no expected values."""

from __future__ import annotations

import torch


class Counting(torch.nn.Linear):
    """Has a count as extra state."""

    def __init__(self, count: int = 0) -> None:
        super().__init__(2, 2)
        torch.nn.init.ones_(self.weight), torch.nn.init.ones_(self.bias)
        self.count = count

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]
