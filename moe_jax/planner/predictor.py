"""Predict the next step's loads from past ones, and report the error of past predictions.

Inputs: whole loads [L, S, E] by step. Outputs: real loads of the next step and a relative error per layer. A predictor
keeps a window of arrays, nothing else, so that a checkpoint can hold it.

Letters: docs/notation.md; w window.
"""

from __future__ import annotations

import collections
import typing

import numpy as np

from moe_jax.errors import UserError
from moe_jax.planner.options import PlannerOptions


class Predictor(typing.Protocol):
    """Follow the loads of a run."""

    def observe(self, loads: np.ndarray) -> None:
        """Take in the loads [L, S, E] of the newest step."""
        ...

    def predict(self) -> np.ndarray:
        """Return the expected loads [L, S, E] of the next step; needs one observation."""
        ...

    def error(self) -> np.ndarray:
        """Return [L], the mean of sum |predicted - true| / sum true over expert totals in the window; 1 before any."""
        ...


class _WindowPredictor:
    """Keep the last w loads and the errors of the last w predictions."""

    def __init__(self, window: int):
        self.seen: collections.deque[np.ndarray] = collections.deque(maxlen=window)
        self.errors: collections.deque[np.ndarray] = collections.deque(maxlen=max(window, 5))

    def observe(self, loads: np.ndarray) -> None:
        loads = np.asarray(loads)
        if self.seen:
            if loads.shape != self.seen[-1].shape:
                raise UserError(
                    f"loads changed shape from {self.seen[-1].shape} to {loads.shape}; start a new predictor"
                )
            guess = self.predict().sum(axis=1)
            true = loads.sum(axis=1)
            self.errors.append(np.abs(guess - true).sum(axis=1) / np.maximum(true.sum(axis=1), 1))
        self.seen.append(loads)

    def error(self) -> np.ndarray:
        if not self.errors:
            return np.ones(self.seen[-1].shape[0] if self.seen else 0)
        return np.mean(self.errors, axis=0)

    def predict(self) -> np.ndarray:
        if not self.seen:
            raise UserError("a prediction needs the loads of at least one step; observe first")
        return self._predict()

    def _predict(self) -> np.ndarray:
        raise NotImplementedError

    def state(self) -> dict[str, np.ndarray]:
        """Return arrays that `restore` takes back."""
        layers = self.seen[-1].shape[0] if self.seen else 0
        empty = np.zeros((0, 0, 0, 0), np.int64)
        return {
            "seen": np.stack(self.seen) if self.seen else empty,
            "errors": np.stack(self.errors) if self.errors else np.zeros((0, layers)),
        }

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Continue from what `state` returned."""
        self.seen.clear()
        self.seen.extend(np.asarray(state["seen"]))
        self.errors.clear()
        self.errors.extend(np.asarray(state["errors"]))


class LastPredictor(_WindowPredictor):
    """Expect the newest loads again."""

    def __init__(self):
        super().__init__(1)

    def _predict(self) -> np.ndarray:
        return self.seen[-1].astype(np.float64)


class WindowPredictor(_WindowPredictor):
    """Expect the mean of the last w steps (Hecate 4.2: w = 5)."""

    def _predict(self) -> np.ndarray:
        return np.mean(self.seen, axis=0)


class ExponentialPredictor(_WindowPredictor):
    """Expect a mean in which a step's weight shrinks by (1 - decay) with every later step."""

    def __init__(self, decay: float, window: int):
        super().__init__(window)
        self.decay = decay

    def _predict(self) -> np.ndarray:
        age = np.arange(len(self.seen))[::-1]
        weight = (1.0 - self.decay) ** age
        return np.tensordot(weight / weight.sum(), np.stack(self.seen), axes=1)


class TrendPredictor(_WindowPredictor):
    """Expect the next value of the straight line through the last w steps, at least 0, with the newest step's total."""

    def _predict(self) -> np.ndarray:
        seen = np.stack(self.seen).astype(np.float64)
        n = len(seen)
        if n == 1:
            return seen[0]
        time = np.arange(n) - (n - 1) / 2
        slope = np.tensordot(time, seen, axes=1) / (time**2).sum()
        guess = np.maximum(seen.mean(axis=0) + slope * (n + 1) / 2, 0.0)
        total = guess.sum(axis=2, keepdims=True)
        return guess * np.where(total > 0, seen[-1].sum(axis=2, keepdims=True) / np.where(total > 0, total, 1.0), 1.0)


def build_predictor(config: PlannerOptions) -> _WindowPredictor:
    """Return the predictor that a configuration names, its defaults filled in."""
    config = config.settled()
    if config.predictor == "last":
        return LastPredictor()
    if config.predictor == "window":
        return WindowPredictor(config.window)
    if config.predictor == "exponential":
        return ExponentialPredictor(config.decay, config.window)
    return TrendPredictor(config.window)
