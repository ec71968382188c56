"""Logistic regression with L2 regularisation, for labels -1 and 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LogisticRegression", "log_loss", "regularized_loss"]


class LogisticRegression(nn.Module):
    """One weight per feature and no intercept, all zero at the start.

    Args:
        num_features: Features of a sample, >= 1.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_features))

    def forward(self, features: Tensor) -> Tensor:
        """Return a score for each row of ``features``, shape ``(batch,)``. A positive score predicts the label 1."""
        return features @ self.weights


def log_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of ``log(1 + exp(-label * score))``."""
    return functional.softplus(-labels * scores).mean()


def regularized_loss(scores: Tensor, labels: Tensor, weights: Tensor, rate: float) -> Tensor:
    """Return `log_loss` plus ``rate / 2 * |weights|^2``. The term's gradient is ``rate * weights``."""
    return log_loss(scores, labels) + 0.5 * rate * weights.dot(weights)
