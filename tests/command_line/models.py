"""A model by an import path."""

import torch
from torch import nn


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def net_in_halves() -> nn.Module:
    return net().to(torch.bfloat16)


def embedded() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 64), nn.Linear(64, 64))
