"""Trains on nothing with TensorFlow, and says exactly what the training was given: once by Keras, once by a loop."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import hetero
import hetero.tf


class Augmented:
    """Samples that depend on their index and on two global generators."""

    def __init__(self, num_samples: int, sleep_s: float) -> None:
        self.num_samples = num_samples
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.sleep_s)
        image = np.random.rand(8).astype(np.float32) + np.float32(random.random()) + index
        return {"index": index, "image": image, "name": f"sample {index}"}


@hetero.dataset(collate_fn=hetero.collate_arrays)
def tf_augmented(num_samples: int, sleep_s: float = 0.0) -> Augmented:
    """Return the data set."""
    return Augmented(num_samples, sleep_s)


def digest(batch: dict[str, Any]) -> str:
    """Return a digest of the bytes of a batch."""
    chain = hashlib.sha256(np.ascontiguousarray(batch["image"]).tobytes())
    chain.update(b"".join(name if isinstance(name, bytes) else name.encode() for name in batch["name"]))
    return chain.hexdigest()


def main() -> None:
    """Train for two epochs and write what came."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-samples", type=int, required=True)
    parser.add_argument("--sleep-s", type=float, default=0.0)
    args = parser.parse_args()
    sys.modules.update(dict.fromkeys(("matplotlib", "pandas", "sklearn")))  # Keras would import them: half its time
    import tensorflow as tf

    spec = tf_augmented(args.num_samples, args.sleep_s)
    data = hetero.tf.from_dataset(spec, batch_size=8, shuffle=True, seed=17)
    indices: list[list[int]] = []
    digests: list[str] = []

    def note(index: Any, image: Any, name: Any) -> None:
        indices.append(index.tolist())
        digests.append(digest({"image": image, "name": name.tolist()}))
        print(f"step {len(indices)}", flush=True)

    class Recorder(tf.keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            tf.numpy_function(note, [data["index"], data["image"], data["name"]], [])
            return {"loss": tf.constant(0.0)}

    model = Recorder()
    model.compile(jit_compile=False)
    model.fit(data, epochs=1, verbose=0, shuffle=False, callbacks=[data.callback()])
    states = [data.state_dict()]
    for batch in data:
        note(*(batch[name].numpy() for name in ("index", "image", "name")))
    states.append(data.state_dict())
    result = {"indices": indices, "digests": digests, "states": states, "has_torch": "torch" in sys.modules}
    (args.output / "rank-0.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
