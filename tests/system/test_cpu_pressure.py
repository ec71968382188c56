from __future__ import annotations

from pathlib import Path

import pytest

from hetero.system.cpu_pressure import CpuReading, TaskWaits, pressure_between, read_cpus, stolen_between


class Proc:
    """A folder of kernel files, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 100.0

    def psi(self, waited_s: float) -> None:
        (self.folder / "pressure").mkdir(exist_ok=True)
        text = f"some avg10=1.00 avg60=0.00 avg300=0.00 total={int(waited_s * 1e6)}\nfull avg10=0.00 total=7\n"
        (self.folder / "pressure" / "cpu").write_text(text)
        self.stat(0, 0)

    def stat(self, busy: int, idle: int, stolen: int = 0) -> None:
        (self.folder / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 {stolen} 0 0\ncpu0 1 2 3\n")

    def read(self) -> CpuReading:
        found = read_cpus(self.folder, clock=lambda: self.now_s)
        assert found is not None
        return found


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def test_pressure_is_the_share_of_time_in_which_a_process_waited(proc: Proc) -> None:
    proc.psi(10.0)
    first = proc.read()
    proc.now_s += 2.0
    proc.psi(10.5)
    assert pressure_between(first, proc.read()) == pytest.approx(0.25)


def test_pressure_without_the_kernels_figures_comes_from_the_cpu_use(proc: Proc) -> None:
    proc.stat(1000, 1000)
    first = proc.read()
    proc.now_s += 2.0
    proc.stat(1180, 1020)
    assert pressure_between(first, proc.read()) == pytest.approx(0.0, abs=1e-9)
    proc.now_s += 2.0
    proc.stat(1370, 1030)
    assert pressure_between(first, proc.read()) == pytest.approx(0.25)  # busy for 92.5 % of four seconds


def test_host_without_the_kernels_files_has_no_reading(proc: Proc) -> None:
    assert read_cpus(proc.folder) is None


def test_stolen_time_is_a_share_of_the_wanted_time(proc: Proc) -> None:
    proc.stat(1000, 1000)
    first = read_cpus(proc.folder)
    proc.stat(1090, 1500, stolen=910)
    last = read_cpus(proc.folder)
    assert first is not None
    assert last is not None
    assert stolen_between(first, last) == pytest.approx(0.91)
    assert pressure_between(first, last) == 0.0  # of the time that the hypervisor left
    assert stolen_between(last, last) == 0.0


def test_waits_of_threads_are_counted_after_they_have_ended(proc: Proc) -> None:
    waits = TaskWaits(proc.folder)

    def thread(number: int, waited_s: float) -> None:
        folder = proc.folder / "7" / "task" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"5000 {int(waited_s * 1e9)} 3\n")

    assert waits.total_s is None
    thread(7, 1.0)
    thread(8, 2.0)
    waits.add(7)
    assert waits.total_s == pytest.approx(3.0)
    (proc.folder / "7" / "task" / "8" / "schedstat").unlink()
    (proc.folder / "7" / "task" / "8").rmdir()
    thread(7, 1.5)
    waits.add(7)
    waits.add(999)  # a process that has ended
    assert waits.total_s == pytest.approx(3.5)


def test_pressure_of_this_machine_is_a_share() -> None:
    first, last = read_cpus(clock=lambda: 0.0), read_cpus(clock=lambda: 1e9)
    if first is not None and last is not None:
        assert 0.0 <= pressure_between(first, last) <= 1.0
