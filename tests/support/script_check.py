"""Training scripts with one fault each, and right ones. ``# here`` is at the line that a finding must name."""

from __future__ import annotations

import textwrap

HEAD = """
import functools, os, pathlib, random, sqlite3, sys, threading, time, uuid
import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, Subset, TensorDataset
import hetero
from hetero.torch import DataLoader

"""
NUMBERS = """
class Numbers(torch.utils.data.Dataset):
    def __init__(self, count=48):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return torch.tensor([float(index), random.random()])

"""
NUMBERS_FACTORY = """
@hetero.dataset
def numbers(count: int = 48):
    return Numbers(count)

"""
LOOP = """
def train(loader, epochs=3):
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            pass

"""
MAIN = """
def main():
    train(DataLoader(numbers(), batch_size=4, shuffle=True, seed=1))

"""
GUARD = """
if __name__ == "__main__":
    main()
"""


def script(*parts: str) -> str:
    """Return a script of these parts, which may be indented."""
    return HEAD + "".join(textwrap.dedent(part) for part in parts) + GUARD


def of_class(body: str, *, before: str = "") -> str:
    """Return a script whose data set has this body."""
    head = "class Numbers(torch.utils.data.Dataset):\n    def __len__(self):\n        return 48\n"
    text = f"{textwrap.dedent(before)}\n{head}{textwrap.indent(textwrap.dedent(body), '    ')}\n"
    return script(text, NUMBERS_FACTORY.replace("Numbers(count)", "Numbers()"), LOOP, MAIN)


FAULTS = {
    "a factory in a function": script(
        NUMBERS,
        LOOP,
        """
        def main():
            @hetero.dataset  # here
            def numbers():
                return Numbers()
            train(DataLoader(numbers(), batch_size=4))
        """,
    ),
    "fewer shards than lanes": script(
        """
        class Shards(torch.utils.data.IterableDataset):
            def __iter__(self):
                info = torch.utils.data.get_worker_info()
                for shard in range(4)[info.id :: info.num_workers]:
                    yield from range(100 * shard, 100 * shard + 50)

        @hetero.dataset
        def rows():
            return Shards()

        def main():
            loader = DataLoader(rows(), batch_size=4, guarantee="replay", lanes=6, chunk_samples=4)
            for batch in loader:  # here
                pass
        """
    ),
    "no main": HEAD + NUMBERS + NUMBERS_FACTORY + LOOP + "train(DataLoader(numbers(), batch_size=4))  # here\n",
    "an own generator": of_class("""
        def __init__(self):
            self.generator = np.random.default_rng(3)  # here
        def __getitem__(self, index):
            return torch.tensor(self.generator.random() + index)
    """),
    "an unseeded generator": of_class("""
        def __getitem__(self, index):
            generator = np.random.default_rng()  # here
            return torch.tensor(generator.random() + index)
    """),
    "the time": of_class("""
        def __getitem__(self, index):
            return torch.tensor(time.time() + index, dtype=torch.float64)  # here
    """),
    "uuid4": of_class("""
        def __getitem__(self, index):
            return str(uuid.uuid4())  # here
    """),
    "a counter": of_class("""
        def __init__(self):
            self.seen = 0
        def __getitem__(self, index):
            self.seen += 1  # here
            return torch.tensor(self.seen)
    """),
    "a global that main changes": script(
        "SCALE = 1.0\n",
        NUMBERS.replace("float(index)", "SCALE * index"),
        NUMBERS_FACTORY,
        LOOP,
        """
        def main():
            global SCALE
            SCALE = 0.5  # here
            train(DataLoader(numbers(), batch_size=4))
        """,
    ),
    "state of a collate_fn": script(
        """
        class Mixup:
            def __init__(self):
                self.enabled = True
            def __call__(self, samples):
                return torch.stack(samples) * (0.5 if self.enabled else 1.0)
        MIX = Mixup()
        """,
        NUMBERS,
        NUMBERS_FACTORY.replace("@hetero.dataset", "@hetero.dataset(collate_fn=MIX)"),
        """
        def main():
            loader = DataLoader(numbers(), batch_size=4)
            for epoch in range(3):
                loader.set_epoch(epoch)
                MIX.enabled = epoch < 1  # here
                for batch in loader:
                    pass
        """,
    ),
    "a collate_fn of the loader": script(
        "def stack(samples):\n    return torch.stack(samples)\n",
        NUMBERS,
        NUMBERS_FACTORY,
        LOOP,
        """
        def main():
            loader = DataLoader(numbers(), batch_size=4, collate_fn=stack)  # here
            train(loader)
        """,
    ),
    "a data set object": script(
        NUMBERS,
        NUMBERS_FACTORY,
        LOOP,
        """
        def main():
            loader = DataLoader(Numbers(), batch_size=4)  # here
            train(loader)
        """,
    ),
    "a subset of a name": script(
        NUMBERS,
        NUMBERS_FACTORY,
        LOOP,
        """
        def main():
            loader = DataLoader(Subset(numbers(), range(24)), batch_size=4)  # here
            train(loader)
        """,
    ),
    "a sampler without set_epoch": script(
        NUMBERS,
        NUMBERS_FACTORY,
        """
        def main():
            sampler = DistributedSampler(range(48), num_replicas=1, rank=0)  # here
            loader = DataLoader(numbers(), batch_size=4, sampler=sampler)
            for epoch in range(3):
                for batch in loader:
                    pass
        """,
    ),
    "a sampler of its own generator": script(
        """
        class Shuffled(Sampler):
            def __iter__(self):
                order = np.random.default_rng().permutation(48)  # here
                return iter(order.tolist())
            def __len__(self):
                return 48
        """,
        NUMBERS,
        NUMBERS_FACTORY,
        LOOP,
        """
        def main():
            train(DataLoader(numbers(), batch_size=4, sampler=Shuffled()))
        """,
    ),
    "a data set with set_epoch": of_class("""
        epoch = 0
        def set_epoch(self, epoch):  # here
            self.epoch = epoch
        def __getitem__(self, index):
            return index % (1 + self.epoch)
    """),
    "a loader in each epoch": script(
        NUMBERS,
        NUMBERS_FACTORY,
        """
        def main():
            for epoch in range(3):
                loader = DataLoader(numbers(), batch_size=4, shuffle=True)
                for batch in loader:  # here
                    pass
        """,
    ),
    "a relative path": of_class(
        """
        def __getitem__(self, index):
            return int(open("number.txt").read()) + index  # here
        """
    ),
    "the environment": of_class(
        """
        def __getitem__(self, index):
            return index * int(os.environ.get("SCALE", "1"))
        """
    ).replace("def main():\n", 'def main():\n    os.environ["SCALE"] = "3"  # here\n'),
    "a type that does not travel": of_class("""
        def __getitem__(self, index):  # here
            return threading.Lock()
    """).replace("batch_size=4", "batch_size=None"),
    "a handle that main opens": script(
        "DATABASE = None\n",
        NUMBERS.replace("float(index)", "float(DATABASE.execute('select 1').fetchone()[0])"),
        NUMBERS_FACTORY,
        LOOP,
        """
        def main():
            global DATABASE
            DATABASE = sqlite3.connect(":memory:")  # here
            train(DataLoader(numbers(), batch_size=4))
        """,
    ),
    "a file that the loop writes": script(
        'LABELS = pathlib.Path(__file__).with_name("labels.txt")\n',
        NUMBERS.replace("(self, index):", "(self, index):  # here").replace(
            "float(index)", "float(LABELS.read_text())"
        ),
        NUMBERS_FACTORY,
        """
        def main():
            loader = DataLoader(numbers(), batch_size=4)
            for epoch in range(3):
                LABELS.write_text(str(epoch))
                for batch in loader:
                    pass
        """,
    ),
}

RIGHT = {
    "plain": script(NUMBERS, NUMBERS_FACTORY, LOOP, MAIN),
    "a generator of each index": of_class("""
        def __getitem__(self, index):
            return torch.tensor(np.random.default_rng(index).random())
    """),
    "on_seed": of_class("""
        def __init__(self):
            self.generator = np.random.default_rng()
        def on_seed(self, key):
            self.generator = np.random.default_rng(key)
        def __getitem__(self, index):
            return torch.tensor(self.generator.random())
    """),
    "a cache": of_class("""
        def __init__(self):
            self.kept, self.hits = {}, 0
        def __getitem__(self, index):
            self.hits += index in self.kept
            return self.kept.setdefault(index, torch.tensor(index))
    """),
    "the environment at the top": of_class(
        """
        def __getitem__(self, index):
            return torch.tensor(index * SCALE)
        """,
        before='SCALE = int(os.environ.get("SOME_SCALE", "2"))\n',
    ),
    "a path of the script": of_class(
        """
        def __getitem__(self, index):
            return len(HERE.read_text()) + index
        """,
        before="HERE = pathlib.Path(__file__).resolve()\n",
    ),
    "a connection of each process": of_class("""
        def __init__(self):
            self.of = None
        def __getitem__(self, index):
            if self.of is None or self.of[0] != os.getpid():
                self.of = os.getpid(), sqlite3.connect(":memory:")
            return torch.tensor(self.of[1].execute("select 2").fetchone()[0] * index)
    """),
    "arguments": script(
        "import argparse\n",
        NUMBERS,
        NUMBERS_FACTORY,
        LOOP,
        """
        def main():
            parser = argparse.ArgumentParser()
            parser.add_argument("--count", type=int, default=40)
            args = parser.parse_args()
            train(DataLoader(numbers(args.count), batch_size=4, shuffle=True))
        """,
    ),
    "a global that only main reads": script(
        "EPOCHS = 1\n",
        NUMBERS,
        NUMBERS_FACTORY,
        LOOP,
        """
        def main():
            global EPOCHS
            EPOCHS = 3
            train(DataLoader(numbers(), batch_size=4), EPOCHS)
        """,
    ),
    "training and validation": script(
        NUMBERS,
        NUMBERS_FACTORY,
        """
        def main():
            loader = DataLoader(numbers(), batch_size=4, shuffle=True, name="train")
            validation = DataLoader(numbers(12), batch_size=4, padding=False, name="validation")
            for epoch in range(3):
                loader.set_epoch(epoch)
                for batch in loader:
                    pass
                for batch in validation:
                    started = time.time()
        """,
    ),
    "a sampler with set_epoch": script(
        NUMBERS,
        NUMBERS_FACTORY,
        LOOP,
        """
        def main():
            sampler = DistributedSampler(range(48), num_replicas=1, rank=0)
            train(DataLoader(numbers(), batch_size=4, sampler=sampler))
        """,
    ),
    "one epoch of a sampler": script(
        NUMBERS,
        NUMBERS_FACTORY,
        """
        def main():
            sampler = DistributedSampler(range(48), num_replicas=1, rank=0)
            for batch in DataLoader(numbers(), batch_size=4, sampler=sampler):
                pass
        """,
    ),
    "folds of one data set": script(
        "from torch.utils.data import SubsetRandomSampler\n",
        NUMBERS,
        NUMBERS_FACTORY,
        """
        def main():
            for fold in range(3):
                indices = [index for index in range(48) if index % 3 != fold]
                for batch in DataLoader(numbers(), batch_size=4, sampler=SubsetRandomSampler(indices)):
                    pass
        """,
    ),
    "a validation sampler": script(
        NUMBERS,
        NUMBERS_FACTORY,
        """
        def main():
            sampler = DistributedSampler(range(48), num_replicas=1, rank=0, shuffle=False)
            for epoch in range(3):
                for batch in DataLoader(numbers(), batch_size=4, sampler=sampler):
                    pass
        """,
    ),
    "a sampler of the global generator": script(
        """
        class Shuffled(Sampler):
            def __iter__(self):
                return iter(torch.randperm(48).tolist())
            def __len__(self):
                return 48
        """,
        NUMBERS,
        NUMBERS_FACTORY,
        LOOP,
        """
        def main():
            train(DataLoader(numbers(), batch_size=4, sampler=Shuffled()))
        """,
    ),
    "buckets without a length": script(
        """
        class Buckets:
            def __iter__(self):
                starts = list(range(0, 48, 6))
                random.shuffle(starts)
                return ([start + each for each in range(6)] for start in starts)
        """,
        NUMBERS,
        NUMBERS_FACTORY,
        LOOP,
        """
        def main():
            train(DataLoader(numbers(), batch_sampler=Buckets()))
        """,
    ),
    "a collate_fn of the data set": of_class("""
        def __getitem__(self, index):
            return index
        def collate_fn(self, samples):
            return {"index": torch.tensor(samples)}
    """),
    "a collate_fn with options": script(
        """
        def pad(samples, multiple):
            return torch.stack(samples)[: len(samples) // multiple * multiple]
        """,
        NUMBERS,
        NUMBERS_FACTORY.replace("@hetero.dataset", "@hetero.dataset(collate_fn=functools.partial(pad, multiple=2))"),
        LOOP,
        MAIN,
    ),
    "a worker_init_fn": script(
        "def init(index):\n    torch.set_num_threads(1)\n",
        NUMBERS,
        NUMBERS_FACTORY.replace("@hetero.dataset", "@hetero.dataset(worker_init_fn=init)"),
        LOOP,
        MAIN,
    ),
    "a process group and a state": script(
        NUMBERS,
        NUMBERS_FACTORY,
        """
        def main():
            torch.distributed.init_process_group("gloo")
            loader = DataLoader(numbers(), batch_size=4, shuffle=True)
            next(iter(loader))
            resumed = DataLoader(numbers(), batch_size=4, shuffle=True)
            resumed.load_state_dict(loader.state_dict())
            for epoch in range(2):
                for batch in resumed:
                    pass
            torch.distributed.destroy_process_group()
        """,
    ),
    "steps counted by hand": script(
        NUMBERS,
        NUMBERS_FACTORY,
        """
        def main():
            loader = DataLoader(numbers(), batch_size=4, shuffle=True)
            for epoch in range(3):
                loader.set_epoch(epoch)
                batches = iter(loader)
                for step in range(len(loader)):
                    next(batches)
        """,
    ),
    "an endless loop": script(
        NUMBERS,
        NUMBERS_FACTORY,
        """
        def cycle(loader):
            while True:
                yield from loader

        def main():
            batches = cycle(DataLoader(numbers(), batch_size=4, shuffle=True))
            for step in range(10**9):
                next(batches)
        """,
    ),
}
