"""Random numbers drawn from every generator of a rank."""

from __future__ import annotations

import random

import numpy as np
import torch


def drawn() -> tuple[float, ...]:
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
    )
