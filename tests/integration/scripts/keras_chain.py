"""Trains on a PyDataset that shuffles itself between epochs: epoch 0 by fit, epoch 1 in a loop that may be resumed."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.modules.update(dict.fromkeys(("matplotlib", "pandas", "sklearn")))  # Keras would import them: half its time

import keras  # noqa: E402
import numpy as np  # noqa: E402

import hetero  # noqa: E402
import hetero.tf  # noqa: E402


class Photos(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches that depend on two global generators, of samples in an order that each epoch shuffles further."""

    def __init__(self, num_samples: int, batch_size: int) -> None:
        super().__init__(workers=1, use_multiprocessing=True, max_queue_size=4)
        self.batch_size = batch_size
        self.indexes = np.arange(num_samples)
        self.num_epochs = 0

    def __len__(self) -> int:
        return -(-len(self.indexes) // self.batch_size)

    def __getitem__(self, number: int) -> Any:
        chosen = self.indexes[self.batch_size * number :][: self.batch_size]
        images = np.random.rand(len(chosen), 8).astype(np.float32) + np.float32(random.random() + self.num_epochs)
        return images, chosen

    def on_epoch_end(self) -> None:
        self.num_epochs += 1
        np.random.shuffle(self.indexes)


@hetero.dataset
def keras_chain_photos(num_samples: int) -> Photos:
    """Return the data set."""
    return Photos(num_samples, batch_size=8)


def digest(images: Any, indices: Any) -> str:
    """Return the indices of a batch and a digest of its bytes."""
    return f"{indices.tolist()} {hashlib.sha256(np.ascontiguousarray(images).tobytes()).hexdigest()}"


def main() -> None:
    """Train for an epoch and a half, or from the state that was saved in the midst of the second one to its end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-samples", type=int, required=True)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    import tensorflow as tf

    data = hetero.tf.from_dataset(keras_chain_photos(args.num_samples), batch_size=None, shuffle=True, seed=17)
    taken: list[str] = []
    state_path = args.output / "state.json"

    class Recorder(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            tf.numpy_function(lambda *batch: taken.append(digest(*batch)), list(data), [])
            return {"loss": tf.constant(0.0)}

    if args.resume:
        data.load_state_dict(json.loads(state_path.read_text()))
        taken += [digest(*(part.numpy() for part in batch)) for batch in data]
    else:
        model = Recorder()
        model.compile(jit_compile=False)
        model.fit(data, epochs=1, verbose=0, shuffle=False, callbacks=[data.callback()])
        for batch in data:
            taken.append(digest(*(part.numpy() for part in batch)))
            if len(taken) == len(data) + 2:
                break
        state_path.write_text(json.dumps(data.state_dict()))
    result = {"taken": taken, "has_torch": "torch" in sys.modules}
    (args.output / ("resumed.json" if args.resume else "begun.json")).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
