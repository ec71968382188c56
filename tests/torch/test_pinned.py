"""`pin_memory=True` with endpoints: batches are received into the pinned memory that the script gets."""

from __future__ import annotations

import collections
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import hetero
from hetero.batches.structure.leaves import Leaf, _owner, restore
from hetero.control.rank import session as control
from hetero.loaders import pipeline
from hetero.torch import DataLoader, loader
from hetero.torch import pinned as pinned_memory
from tests.support.torch.endpoints import ServedJob, imported_script
from tests.support.torch.loaders import rebuilt_by_tool
from tests.support.waiting import wait_for

needs_accelerator = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SCRIPT = """
    import numpy as np
    import torch

    import hetero

    class Mixed(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            return torch.full((3, 200), index, dtype=torch.uint8), np.full(50, index), index, "text " * 100

    def keep_arrays(samples):
        images, arrays, labels, texts = zip(*samples)
        labels = torch.tensor(labels)
        return {"image": torch.stack(images), "empty": torch.zeros(0), "scalar": labels.sum(), "even": labels % 2 == 0,
                "array": np.stack(arrays), "text": list(texts), "numbers": list(range(20)), "half": labels.bfloat16()}

    @hetero.dataset(collate_fn=keep_arrays)
    def pinned_test_mixed():
        return Mixed()
"""


class Memory(bytearray):
    """Memory whose end can be watched."""


class Pinned:
    """Replaces torch's allocator of pinned memory on a machine without an accelerator."""

    def __init__(self) -> None:
        self.addresses: dict[int, int] = {}
        self.living: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
        self.failure: Exception | None = None

    def empty(self, nbytes: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        if self.failure is not None:
            raise self.failure
        memory = Memory(nbytes)
        tensor = torch.frombuffer(memory, dtype=dtype)
        self.addresses[tensor.data_ptr()] = nbytes
        self.living[id(memory)] = memory
        return tensor


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with imported_script(tmp_path_factory.mktemp("script"), "pinned_test_script", SCRIPT) as module:
        yield module


@pytest.fixture(scope="module")
def session(script: Any) -> Iterator[ServedJob]:
    """A job of one endpoint, and this process as its only rank."""
    path = Path(script.__file__)
    job = ServedJob(path.parent, path)
    try:
        job.start(1)
        yield job
    finally:
        job.stop()


@pytest.fixture
def job(session: ServedJob, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(control, "_session", session)
    monkeypatch.setattr(pipeline, "_num_verified", {})
    yield
    ServedJob.disconnect()
    hetero.spec.set_describer(None)


@pytest.fixture
def pinned(job: None, monkeypatch: pytest.MonkeyPatch) -> Pinned:
    pinned = Pinned()
    monkeypatch.setattr(loader, "accelerator_is_available", lambda: True)
    monkeypatch.setattr(pinned_memory, "torch", SimpleNamespace(empty=pinned.empty, uint8=torch.uint8))
    return pinned


def plain(wanted: Any) -> Any:
    return rebuilt_by_tool(wanted, num_workers=wanted.num_workers)


@pytest.mark.integration
@pytest.mark.parametrize("rebuild", [lambda wanted: wanted, plain], ids=["ours", "rebuilt by a tool"])
def test_tensors_with_pin_memory_are_the_memory_received_into(
    script: Any, pinned: Pinned, rebuild: Callable[[Any], Any]
) -> None:
    wanted = DataLoader(script.pinned_test_mixed(), batch_size=4, pin_memory=True)
    assert wanted.pin_memory
    for number, batch in enumerate(rebuild(wanted)):
        expected = torch.arange(4 * number, 4 * number + 4)
        assert torch.equal(batch["image"], expected.to(torch.uint8)[:, None, None].expand(4, 3, 200))
        assert torch.equal(batch["half"], expected.bfloat16())
        assert batch["even"].tolist() == [True, False, True, False]
        assert batch["scalar"] == expected.sum()
        for name in ("image", "half", "even", "scalar"):
            assert pinned.addresses[batch[name].data_ptr()] == batch[name].nbytes
            # Its very storage: the allocator finds copies by it.
            assert batch[name].untyped_storage().data_ptr() == batch[name].data_ptr()
            assert batch[name]._is_view()
        batch["image"] += 1  # the script's own


@pytest.mark.integration
def test_other_leaves_with_pin_memory_stay_in_ordinary_memory(script: Any, pinned: Pinned) -> None:
    for number, batch in enumerate(DataLoader(script.pinned_test_mixed(), batch_size=4, pin_memory=True)):
        assert type(batch["array"]) is np.ndarray
        # The living ones only: ordinary memory may lie where pinned memory was before.
        living = [np.frombuffer(memory, np.uint8).ctypes.data for memory in pinned.living.values()]
        assert batch["array"].ctypes.data not in living
        assert (batch["array"] == np.arange(4 * number, 4 * number + 4)[:, None]).all()
        assert batch["text"] == ["text " * 100] * 4
        assert batch["numbers"] == list(range(20))
        assert batch["empty"].shape == (0,)
    assert set(pinned.addresses.values()) == {4 * 600, 4, 8}  # images, the rest; no arrays, lists and texts


@pytest.mark.integration
def test_pinned_memory_is_given_back_with_the_last_tensor_of_it(script: Any, pinned: Pinned) -> None:
    batches = iter(DataLoader(script.pinned_test_mixed(), batch_size=4, pin_memory=True))
    part = next(batches)["image"][1:]
    kept = pinned.addresses[part.data_ptr() - 600]
    collections.deque(batches, maxlen=0)
    del batches  # and with it the loader, whose first batches of the next epoch another thread gives back
    wait_for(lambda: [len(memory) for memory in list(pinned.living.values())] == [kept])
    assert (part == torch.arange(1, 4, dtype=torch.uint8)[:, None, None]).all()
    del part
    wait_for(lambda: not pinned.living)  # a batch of the next epoch may still arrive, and is given back too


@pytest.mark.integration
def test_pinned_memory_that_runs_out_is_the_error_that_the_script_sees(
    script: Any, pinned: Pinned, caplog: pytest.LogCaptureFixture
) -> None:
    pinned.failure = RuntimeError("CUDA error: out of memory")
    with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
        list(DataLoader(script.pinned_test_mixed(), batch_size=4, pin_memory=True))
    pinned.failure = None
    assert len(list(DataLoader(script.pinned_test_mixed(), batch_size=4, pin_memory=True))) == 6


@pytest.mark.integration
def test_pin_memory_without_an_accelerator_is_without_effect(
    script: Any, job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "accelerator_is_available", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = DataLoader(script.pinned_test_mixed(), batch_size=4, pin_memory=True)
        assert not wanted.pin_memory
        for batches in (wanted, plain(wanted)):
            assert len([batch["image"].sum() for batch in batches]) == 6


@pytest.mark.integration
@needs_accelerator
def test_tensors_on_an_accelerator_host_are_pinned_once(script: Any, job: None) -> None:
    wanted = DataLoader(script.pinned_test_mixed(), batch_size=4, pin_memory=True)
    for batch in wanted:
        image = batch["image"]
        assert image.is_pinned()
        assert image.pin_memory().data_ptr() == image.data_ptr()  # what torch's own loader would do to it
    rebuilt: Any = rebuilt_by_tool(wanted, pin_memory=wanted.pin_memory)
    assert all(batch["image"].is_pinned() for batch in rebuilt)


@needs_accelerator
def test_pinned_memory_that_is_being_copied_is_not_given_away() -> None:
    nbytes = 2**24
    room = pinned_memory.allocate_pinned(nbytes)
    room[:] = bytes(nbytes)
    batch = restore(Leaf(container="tensor", dtype="u8", shape=(nbytes,), nbytes=nbytes, data=room))
    address = batch.data_ptr()
    del room
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]  # cycles: the copy has to wait
    copied = batch[1:].to("cuda", non_blocking=True)
    del batch
    others = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).fill_(255) for _ in range(2)]
    assert address not in [other.data_ptr() for other in others]
    assert not copied.any()


@pytest.mark.parametrize(
    ("dtype", "itemsize"), [("u8", 1), ("bool", 1), ("i16", 2), ("bf16", 2), ("f32", 4), ("i64", 8)]
)
@pytest.mark.parametrize("shape", [(2, 3), (6,), (1, 1), ()])
def test_restored_tensor_shares_the_storage_of_torchs_memory(dtype: str, itemsize: int, shape: tuple[int, ...]) -> None:
    nbytes = int(np.prod(shape)) * itemsize
    owner = torch.zeros(nbytes + 5, dtype=torch.uint8)  # an allocator may round up
    data = memoryview(owner.numpy())[:nbytes]
    restored = restore(Leaf(container="tensor", dtype=dtype, shape=shape, nbytes=nbytes, data=data))
    assert restored.shape == shape
    assert torch._C._is_alias_of(restored, owner)
    restored.fill_(1)
    assert owner[:nbytes].any()
    assert not owner[nbytes:].any()


def test_memory_of_a_tensor_leads_back_to_the_tensor() -> None:
    # What the above rests on, and no documentation promises: through NumPy's array to the tensor that it was made of.
    owner = torch.zeros(16, dtype=torch.uint8)
    data: Any = memoryview(owner.numpy())
    for part in (data, data[:8], data.cast("B"), data[:12][:8]):
        assert isinstance(part.obj.base, torch.Tensor), f"torch {torch.__version__} keeps the tensor somewhere else"
        found = _owner(torch, part)
        assert found is not None
        assert torch._C._is_alias_of(found, owner)


@pytest.mark.parametrize(
    "data",
    [
        memoryview(torch.arange(12, dtype=torch.uint8).numpy())[4:],
        memoryview(torch.arange(24, dtype=torch.uint8)[::2].contiguous()[2:].numpy())[:8],
        memoryview(torch.arange(8, dtype=torch.int8).numpy()).cast("B"),
        memoryview(torch.arange(8, dtype=torch.uint8).view(2, 4).numpy()).cast("B"),
        memoryview(np.arange(8, dtype=np.uint8)),
        memoryview(bytearray(range(8))),
        memoryview(bytes(range(8))),
    ],
)
def test_restored_tensor_of_any_other_memory_has_its_bytes(data: memoryview) -> None:
    restored = restore(Leaf(container="tensor", dtype="u8", shape=(2, 4), nbytes=8, data=data[:8]))
    assert bytes(restored.numpy()) == bytes(data[:8])
