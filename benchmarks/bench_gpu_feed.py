"""Can the data plane keep an accelerator busy with a real training step?

Question: what is the utilisation of a ResNet-50 training step that is fed uint8 batches over the data plane and
normalises them on the device, against the same step with a batch that is already there (headspace)?

Method: the network is written out below. Endpoints hold batches of uint8 images ready, because the benchmark measures
the transport and not the decoding. Batches are copied to the device while the previous step computes, and are
normalised there. ``cached`` uses one batch that stays on the device. Utilisation is cached step time over fed step
time. ``torch`` is fed by a local torch.utils.data.DataLoader process, pinned by torch.

Without a GPU a small residual network runs on one CPU thread. This result shows that the loop works, and nothing about
a GPU.

    python benchmarks/bench_gpu_feed.py --short
    python benchmarks/bench_gpu_feed.py --batch-size 256 --endpoints 2
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import harness
import torch
from feeds import ready_batches, ready_feeds, served
from harness import Trial
from torch import Tensor, nn

from hetero.spec import DatasetSpec

STAGES_50 = (3, 4, 6, 3)

COLUMNS = harness.columns("samples_per_s", "batches_per_s", "gb_per_s", "trainer_cpu_s_per_gb", "trainer_peak_bytes")


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a shortcut."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = 4 * width
        self.body = nn.Sequential(
            *_convolution(channels_in, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, channels_out, 1),
        )
        same = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(channels_in, channels_out, 1, stride))

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.relu(self.body(images) + self.shortcut(images))


def _convolution(channels_in: int, channels_out: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return (
        nn.Conv2d(channels_in, channels_out, size, stride, size // 2, bias=False),
        nn.BatchNorm2d(channels_out),
    )


def residual_network(stages: tuple[int, ...], width: int, num_classes: int = 1000) -> nn.Module:
    """Return a residual network. ``STAGES_50`` and width 64 make ResNet-50.

    Args:
        stages: Blocks per stage.
        width: Width of the first stage. It doubles from stage to stage.
        num_classes: Number of outputs.
    """
    layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, num_blocks in enumerate(stages):
        for block in range(num_blocks):
            layers.append(Bottleneck(channels, width << stage, 2 if stage and not block else 1))
            channels = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


class _Trainer(ready_feeds.Feed):
    """A training loop that copies one batch ahead. Subclasses feed it."""

    def start(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._is_cuda = self.device.type == "cuda"
        if self._is_cuda:
            torch.backends.cudnn.benchmark = True
            model: Any = residual_network(STAGES_50, 64)
        else:
            torch.set_num_threads(1)
            model = residual_network((1, 1), 16)
        self._model = model.to(self.device, memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._mean = torch.tensor([123.7, 116.3, 103.5], device=self.device).view(1, 3, 1, 1)
        self._scale = torch.tensor([58.4, 57.1, 57.4], device=self.device).view(1, 3, 1, 1)
        self._stream: Any = torch.cuda.Stream() if self._is_cuda else None
        self._next: tuple[Tensor, Tensor] | None = None
        self._pending: Any = None
        self.pin_memory = self._is_cuda
        super().start()

    def spec(self) -> DatasetSpec:
        return ready_batches.ready_images(self.config["batch_size"], self.config["size"])

    def consume(self, batch: Any) -> tuple[int, int]:
        current, self._next = self._next, self._upload(batch)
        if current is not None:
            self._step(*current)
        return len(batch[0]), batch[0].nbytes + batch[1].nbytes

    def _upload(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Copy to the device while the step before is still computing."""
        if not self._is_cuda or batch[0].is_cuda:
            return batch[0], batch[1]
        with torch.cuda.stream(self._stream):
            images, labels = (part.to(self.device, non_blocking=True) for part in batch)
        self._pending = batch  # its memory must stay until the copy is over, which the next step waits for
        return images, labels

    def _step(self, images: Tensor, labels: Tensor) -> None:
        if self._is_cuda:
            # The images were copied on another stream. Their memory may be freed only after this step.
            torch.cuda.current_stream().wait_stream(self._stream)
            for part in (images, labels):
                part.record_stream(torch.cuda.current_stream())
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._is_cuda):
            inputs = ((images.float() - self._mean) / self._scale).contiguous(memory_format=torch.channels_last)
            loss = nn.functional.cross_entropy(self._model(inputs), labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        if self._is_cuda:
            torch.cuda.synchronize()  # a trainer that logs its loss does that, too

    def facts(self) -> dict[str, Any]:
        name = torch.cuda.get_device_name() if self._is_cuda else "CPU"
        model = "ResNet-50, bfloat16 autocast" if self._is_cuda else "a small residual network"
        return {"device": name, "model": model}


class Cached(_Trainer):
    def batches(self) -> Iterator[Any]:
        images, labels = self.local()[0]
        batch = tuple(torch.from_numpy(part).to(self.device) for part in (images, labels))
        return itertools.repeat(batch)


class Hetero(_Trainer, ready_feeds.Hetero):
    pass


class TorchWorkers(_Trainer, ready_feeds.TorchWorkers):
    pass


COMPETITORS = {"cached": Cached, "hetero": Hetero, "torch": TorchWorkers}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and write its table."""
    is_cuda = torch.cuda.is_available()
    parser = harness.parser(__doc__, seconds=10.0 if is_cuda else 3.0, short_seconds=1.0)
    parser.add_argument("--batch-size", type=int, default=256 if is_cuda else 16, help="images (%(default)s)")
    parser.add_argument("--size", type=int, default=224 if is_cuda else 96, help="height and width (%(default)s)")
    parser.add_argument("--endpoints", type=int, default=1, help="(%(default)s)")
    args = parser.parse_args(argv)
    plan = harness.plan("gpu_feed", parser, args)
    config = {"batch_size": args.batch_size, "size": args.size, "num_endpoints": args.endpoints}
    group = "GPU" if is_cuda else "no GPU: a small model on the CPU"
    trials = [
        Trial(competitor=name, config=config, group=group, start_s=6.0, warmup_s=1.0)
        for name in args.only or COMPETITORS
    ]
    rows = plan.compare(__file__, trials, warmup_batches=8, fresh=not args.short)
    title = "A training step fed over the data plane"
    plan.write(rows, harness.report(title, rows, COLUMNS, figures, ratio_metric="samples_per_s", references=["hetero"]))
    return 0


def figures(rows: Sequence[harness.Row]) -> list[str]:
    """Say what was run, and the utilisation."""
    facts = next((run.facts for row in rows for run in row.runs), {"device": "nothing", "model": "nothing"})
    config = rows[0].trial.config
    size = config["size"]
    what = (
        f"{facts['model']} on {facts['device']}; {config['num_endpoints']} endpoint(s); "
        f"batches of {config['batch_size']} x 3 x {size} x {size} uint8, normalised on the device."
    )
    if facts["device"] == "CPU":
        what += "\n\n**No GPU was there.** The loop works; this says nothing about feeding a GPU."
    return [
        what,
        "",
        f"- utilisation (cached step / fed step): {harness.ratio(rows, 'hetero', 'cached', 'samples_per_s'):.3f}",
        f"- beside a torch worker: {harness.ratio(rows, 'hetero', 'torch', 'samples_per_s'):.3f}",
    ]


if __name__ == "__main__":
    harness.dispatch(COMPETITORS, {"endpoints": served.endpoints})
    sys.exit(main())
