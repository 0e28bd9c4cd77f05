"""The policy network in NumPy: its layers, and the edits that a mask leaves it to choose from."""

import math

import numpy as np
import numpy.typing as npt

from env.action import CORES, KIND, can_serve, leaves_none, legal_edits, open_edits
from env.codes import SERVICE
from env.control import ControlState


class MaskedNetwork:
    """
    The deterministic policy: the legal action with the largest logit.

    :param layers: (weight float32[out, in], bias float32[out]) of each layer, ReLU between them
    """

    def __init__(self, layers: list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]):
        self._layers = layers

    def logits(self, features: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """
        The network's output, not masked.

        :param features: float32[..., n_features]
        :return: float32[..., n_actions]
        """
        *hidden, (weight, bias) = self._layers
        for inner_weight, inner_bias in hidden:
            features = np.maximum(features @ inner_weight.T + inner_bias, 0.0)
        return features @ weight.T + bias

    def act(self, observation: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """
        The best legal action.

        :param observation: float32[..., n_features + n_actions], the mask at its end
        :return: int64[...], indices of actions
        """
        n_features = self._layers[0][0].shape[1]
        logits = self.logits(observation[..., :n_features])
        return np.where(observation[..., n_features:] > 0.5, logits, -np.inf).argmax(axis=-1)


class SingleNetwork:
    """
    `MaskedNetwork` for one observation at a time, in a third of the time.

    Nothing is allocated, and biases are weights of an input that is always 1. The caller writes the
    network's input into `features`, float32[n_features].

    :param layers: see `MaskedNetwork`
    """

    def __init__(self, layers: list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]):
        self._weights = [np.column_stack(layer).astype(np.float32) for layer in layers]
        self._inputs = [np.ones(weight.shape[1], np.float32) for weight in self._weights]
        self.features = self._inputs[0][:-1].data
        self._outputs = [inputs[:-1] for inputs in self._inputs[1:]]
        self._logits = np.zeros(len(self._weights[-1]), np.float32)

    def choose(self, penalty: npt.NDArray[np.float32]) -> int:
        """
        The best legal action.

        :param penalty: float32[n_actions], 0 where an action is legal and -inf where it is not
        :raises ValueError: if the network's output is not a number
        """
        for weight, inputs, output in zip(self._weights, self._inputs, self._outputs, strict=False):
            np.dot(weight, inputs, output)
            np.maximum(output, 0.0, out=output)
        logits = np.dot(self._weights[-1], self._inputs[-1], self._logits)
        logits += penalty
        best = int(logits.argmax())
        if not math.isfinite(logits[best]):
            raise ValueError(f"the network's output is {logits[best]}")
        return best


class KnownMasks:
    """
    `env.action.legal_edits` with a memory, because a run meets the same few masks again and again.

    :param rows: int64[n_edits, 7], see `env.action.EditTable`
    """

    LIMIT = 1000

    def __init__(self, rows: npt.NDArray[np.int64]):
        self._rows = rows
        self._service_sets = [int(row[CORES]) for row in rows if row[KIND] == SERVICE]
        self._known: dict[tuple[object, ...], npt.NDArray[np.float32]] = {}

    def penalty(self, control: ControlState) -> npt.NDArray[np.float32]:
        """
        What is added to the network's output, so that illegal edits lose.

        :param control: a control row
        :return: float32[n_edits], 0 where an edit is legal and -inf where it is not
        """
        places, desired = tuple(control.desired_place), tuple(control.desired_state)
        # This is all that `legal_edits` looks at.
        seen = (open_edits(control), leaves_none(control), desired, places)
        key = (*seen, *[can_serve(control, cores) for cores in self._service_sets])
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= self.LIMIT:
                self._known.clear()
            legal = [0.0] * len(self._rows)
            legal_edits(control, self._rows, legal)
            known = np.where(np.array(legal) > 0.5, 0.0, -np.inf).astype(np.float32)
            self._known[key] = known
        return known
