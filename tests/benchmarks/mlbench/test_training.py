"""The first steps of several workers against a reference in one process, and the division of the data.

With one and two workers, weights are equal bit for bit: each worker computes the same operations on the same samples as
the reference with one thread, dividing by 1 or 2 is exact, and a sum of two numbers does not depend on their order.
With four workers, gloo adds each part of the gradients in another order, so sums differ in their last bits.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from hetero.torch import DataLoader

Load = Callable[[str], ModuleType]
Alone = Callable[..., dict[str, list[float]]]
MLBENCH = Path(__file__).parents[3] / "benchmarks" / "mlbench"
NUM_STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(load: Load, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with stand-in data of both tasks."""
    found = tmp_path_factory.mktemp("data")
    standin = load("tasks.standin")
    standin.make_epsilon(found / "rows", num_train=1250, num_test=50, num_features=60)
    standin.make_cifar(found / "images", num_train=250, num_test=10)
    return found


@pytest.fixture
def alone(load: Load, monkeypatch: pytest.MonkeyPatch) -> Alone:
    """Give a function that runs a task as the only worker, in this process, and returns the logged values by name."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def run(task: str, *arguments: str) -> dict[str, list[float]]:
        logged: dict[str, list[float]] = {}
        hetero = importlib.import_module("hetero")
        monkeypatch.setattr(
            hetero, "log_metric", lambda name, value, step=None: logged.setdefault(name, []).append(value)
        )
        load(task).main(arguments)
        return logged

    return run


def train(task: str, data: Path, num_workers: int, *options: str) -> tuple[dict[str, Tensor], str]:
    """Run the first steps with real processes, and return the saved parameters and the output."""
    saved = data.with_name(f"{task}-{num_workers}.pt")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_workers)]
    script = [str(MLBENCH / f"{task}.py"), "--data", str(data), "--max-steps", str(NUM_STEPS), "--save", str(saved)]
    done = subprocess.run(
        [*launch, *script, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(MLBENCH.parents[1])},
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return torch.load(saved, weights_only=True), output


def of_each_worker(data: torch.utils.data.Dataset[object], batch_size: int, num_workers: int) -> list[list[object]]:
    """Return the first batches of each worker."""
    found = []
    for rank in range(num_workers):
        loader: DataLoader[object] = DataLoader(
            data, batch_size=batch_size, shuffle=True, seed=1, drop_last=True, shard=(rank, num_workers)
        )
        loader.set_epoch(0)
        found.append([batch for batch, _ in zip(loader, range(NUM_STEPS), strict=False)])
    return found


def average(gradients: list[Tensor]) -> Tensor:
    """Divide, then add, as the workers do."""
    total = gradients[0] / len(gradients)
    for gradient in gradients[1:]:
        total = total + gradient / len(gradients)
    return total


def reference_2a(load: Load, data: Path, num_workers: int) -> Tensor:
    linear = load("tasks.linear")
    alpha = {1: 200.0, 2: 400.0, 4: 600.0}[num_workers]
    rows = load("tasks.rows").RowDataset(str(data), "train")
    batches = of_each_worker(rows, 100, num_workers)
    weights = torch.zeros(60)
    for step in range(NUM_STEPS):
        gradients = []
        for rank in range(num_workers):
            features, labels = batches[rank][step]  # type: ignore[misc]
            own = weights.clone().requires_grad_()
            linear.regularized_loss(features @ own, labels, own, 2.5e-6).backward()
            assert own.grad is not None
            gradients.append(own.grad)
        weights = torch.add(weights, average(gradients), alpha=-alpha / (step + 1) ** 0.5)
    return weights


def reference_1a(load: Load, data: Path, num_workers: int, version: int = 1) -> dict[str, Tensor]:
    """Return the parameters after SGD with Nesterov's momentum, written out."""
    torch.manual_seed(1)
    network = load("tasks.residual").ResNet(version=version, depth=20)
    images = load("tasks.images").ImageDataset(str(data), "train")
    batches = of_each_worker(images, 32, num_workers)
    steps_per_epoch = 250 // (32 * num_workers)
    parameters = dict(network.named_parameters())
    momenta: dict[str, Tensor] = {}
    for step in range(NUM_STEPS):
        gradients = []
        for rank in range(num_workers):
            pixels, labels = batches[rank][step]  # type: ignore[misc]
            loss = torch.nn.functional.cross_entropy(network(pixels), labels)
            gradients.append(torch.autograd.grad(loss, list(parameters.values())))
        rate = 0.1 / 256 * 32 * (1 + (num_workers - 1) * step / (5 * steps_per_epoch))
        for place, (name, parameter) in enumerate(parameters.items()):
            gradient = average([own[place] for own in gradients]).add(parameter.detach(), alpha=0.0001)
            momenta[name] = gradient if name not in momenta else momenta[name].mul(0.9).add(gradient)
            with torch.no_grad():
                parameter.add_(gradient.add(momenta[name], alpha=0.9), alpha=-rate)
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.integration
def test_first_steps_of_task_2a_equal_the_reference_bit_for_bit(load: Load, folder: Path) -> None:
    """A limited network changes no bit, and leaves no namespace. Only root can limit it."""
    is_limited = load("tasks.network").why_not() is None
    found, output = train("task_2a", folder / "rows", 2, *(["--network-mbit", "50"] if is_limited else []))
    assert torch.equal(found["weights"], reference_2a(load, folder / "rows", 2))
    assert found["weights"].any()
    assert "data: stand-in for epsilon (train 1250, test 50, features 60, seed 1)" in output
    assert "hetero.log_metric stand_in=1.0" in output
    assert len(re.findall(r"log_metric communication_ratio=", output)) == 2
    sent = [float(each) for each in re.findall(r"log_metric network_bytes=(\S+)", output)]
    assert len(sent) == (2 if is_limited else 0)
    # Each worker sends its gradients of 60 floats, halved or whole, at each step, and headers.
    assert all(each > NUM_STEPS * 60 * 4 for each in sent)
    left = [path.name for path in Path("/run/netns").glob("mlb[0-9]*-*")]
    assert [name for name in left if not Path("/proc", name[3:].partition("-")[0]).exists()] == []


def test_first_steps_of_task_2a_on_one_worker_equal_the_reference_bit_for_bit(
    load: Load, folder: Path, alone: Alone, tmp_path: Path
) -> None:
    saved = tmp_path / "saved.pt"
    alone("task_2a", "--data", str(folder / "rows"), "--max-steps", str(NUM_STEPS), "--save", str(saved))
    found = torch.load(saved, weights_only=True)
    assert torch.equal(found["weights"], reference_2a(load, folder / "rows", 1))


@pytest.mark.integration
@pytest.mark.long
def test_first_steps_of_task_2a_on_four_workers_equal_the_reference_but_for_rounding(load: Load, folder: Path) -> None:
    found, output = train("task_2a", folder / "rows", 4)
    torch.testing.assert_close(found["weights"], reference_2a(load, folder / "rows", 4), rtol=1e-4, atol=1e-4)
    assert len(re.findall(r"log_metric communication_ratio=", output)) == 4


@pytest.mark.integration
@pytest.mark.long
def test_first_steps_of_task_1a_equal_the_reference_bit_for_bit(load: Load, folder: Path) -> None:
    found, _ = train("task_1a", folder / "images", 2)
    expected = reference_1a(load, folder / "images", 2)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize("version", [1, 2])
def test_first_steps_of_task_1a_on_one_worker_equal_the_reference_bit_for_bit(
    load: Load, folder: Path, alone: Alone, tmp_path: Path, version: int
) -> None:
    saved = tmp_path / "saved.pt"
    options = ["--version", str(version), "--max-steps", str(NUM_STEPS), "--save", str(saved)]
    logged = alone("task_1a", "--data", str(folder / "images"), *options)
    found, expected = torch.load(saved, weights_only=True), reference_1a(load, folder / "images", 1, version)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    assert logged["training_samples"] == [250]
    assert logged["communication_s"] == [0.0]


def test_task_2a_that_ends_by_epochs_evaluates_its_last_steps(folder: Path, alone: Alone) -> None:
    """12 steps are an epoch. Evaluations are due every 100 steps, so there was none."""
    logged = alone("task_2a", "--data", str(folder / "rows"), "--epochs", "1")
    assert len(logged["accuracy"]) == 1
    assert logged["accuracy"][0] > 0.5
    logged = alone("task_2a", "--data", str(folder / "rows"), "--epochs", "1", "--evaluate-every", "6")
    assert len(logged["accuracy"]) == 2  # the last one is not repeated


def test_run_that_diverges_ends_with_a_metric_and_without_a_traceback(folder: Path, alone: Alone) -> None:
    options = ["--alpha", "1e38", "--evaluate-every", "2", "--max-steps", "10"]
    logged = alone("task_2a", "--data", str(folder / "rows"), *options)
    assert logged["diverged"] == [1.0]
    assert "test_loss" not in logged
    assert len(logged["train_s"]) == 1  # the training ended there


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--evaluate-every", "0"], "--evaluate-every is 0, expected at least 1"),
        (["--threads", "0"], "--threads is 0, expected at least 1"),
        (["--epochs", "0"], "--epochs is 0, expected at least 1"),
        (["--target-accuracy", "80"], "--target-accuracy is 80.0, expected a share above 0, at most 1"),
        (["--alpha", "nan"], "--alpha is nan, expected a finite number above 0"),
    ],
)
def test_option_out_of_range_is_named(
    load: Load, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        load("task_2a").main(["--data", "rows", *flags])
    assert message in capsys.readouterr().err


def test_missing_data_ends_the_task_with_a_message(alone: Alone, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: .*matrix\.json does not exist; convert the LIBSVM file"):
        alone("task_2a", "--data", str(tmp_path))


def test_workers_with_different_parameters_are_found(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = load("tasks.exchange")

    def broadcast(received: Tensor, src: int) -> None:
        assert src == 0
        received[1] = torch.nextafter(received[1], torch.tensor(9.0))  # one bit

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda received, src: None)
    exchange.check_agreement(torch.nn.Linear(2, 1))
    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    with pytest.raises(RuntimeError, match="1 of 3 parameters of rank 1 differ from those of rank 0"):
        exchange.check_agreement(torch.nn.Linear(2, 1))


@pytest.mark.parametrize("num_workers", [1, 2, 4, 8])
def test_workers_divide_an_epoch_into_disjoint_whole_batches(num_workers: int) -> None:
    data = TensorDataset(torch.arange(1000))
    steps = []
    for rank in range(num_workers):
        loader: DataLoader[list[Tensor]] = DataLoader(
            data, batch_size=32, shuffle=True, seed=1, drop_last=True, shard=(rank, num_workers)
        )
        steps.append([batch.tolist() for (batch,) in loader])
    assert {len(own) for own in steps} == {1000 // (32 * num_workers)}
    assert {len(batch) for own in steps for batch in own} == {32}
    used = [index for own in steps for batch in own for index in batch]
    assert len(set(used)) == len(used)  # over the epoch, and so in each step


def test_group_on_gpus_has_a_backend_for_cpu_tensors_too(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock and the mean loss are CPU tensors. A group with nccl alone raises at the first evaluation."""
    opened: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **_: opened.append(backend))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.delenv("RANK", raising=False)
    with load("tasks.workers").joined() as device:
        assert device.type == "cuda"
    monkeypatch.setenv("RANK", "0")
    with load("tasks.workers").joined():
        pass
    assert opened == ["cpu:gloo,cuda:nccl"] * 2


def test_evaluations_of_two_hours_stay_below_a_thousand_and_one_percent_apart(load: Load) -> None:
    next_evaluation = load("tasks.course").next_evaluation
    steps = [0]
    while steps[-1] < 4_000_000:  # 1,000 epochs of epsilon on one worker, the prescribed limit
        steps.append(next_evaluation(steps[-1], 100))
    assert steps[1:201] == list(range(100, 20_001, 100))
    assert all(step % 100 == 0 for step in steps)
    assert all(b - a <= max(100, 0.01 * a) for a, b in itertools.pairwise(steps))
    assert len(steps) < 800


def test_clock_stands_during_evaluation_and_the_target_ends_the_training(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    course_module = load("tasks.course")
    logged: list[tuple[str, float, int | None]] = []
    hetero = importlib.import_module("hetero")
    monkeypatch.setattr(hetero, "log_metric", lambda name, value, step=None: logged.append((name, value, step)))
    now = [0.0]
    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    try:
        course = course_module.Course(target_accuracy=0.8, duration_s=100, stops_at_target=True, clock=lambda: now[0])
        course.start()
        now[0] = 10
        course.took_step(torch.tensor(2.0))
        course.took_step(torch.tensor(4.0))
        course.pause()
        now[0] = 50  # the evaluation takes 40 s
        course.evaluated(2, 0.5, 1.0)
        assert not course.is_over()
        course.start()
        now[0] = 55
        course.pause()
        course.evaluated(4, 0.8, 0.5)
        assert course.is_over()
        course.evaluated(5, 0.9, 0.4)
    finally:
        torch.distributed.destroy_process_group()
    assert [each for each in logged if each[0] == "train_s"] == [
        ("train_s", 10, 2),
        ("train_s", 15, 4),
        ("train_s", 15, 5),
    ]
    assert [each for each in logged if each[0] == "loss"] == [("loss", 3.0, 2)]
    assert [each for each in logged if "to_accuracy" in each[0]] == [
        ("time_to_accuracy_s", 15, 4),
        ("steps_to_accuracy", 4, 4),
    ]
