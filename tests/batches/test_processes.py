"""The same batch in processes of their own, whenever these import torch."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")


def test_fetch_in_another_process_gives_the_same_bytes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import random, sys
            import numpy as np
            import hetero.datasets
            from hetero.batches.fetch import fetch
            from hetero.batches.indexed import IndexedWork
            from hetero.batches.request import BatchRequest
            from hetero.datasets import build, dataset

            class Lazy:
                def __len__(self): return 20
                def __getitem__(self, index):
                    import torch  # only now, and its generator must be seeded too
                    return torch.rand(2).tolist(), np.random.rand(), random.random()

            @dataset(collate_fn=list)
            def lazy(): return Lazy()

            if "early" in sys.argv:
                import torch
            assert ("torch" in sys.modules) == ("early" in sys.argv)
            built = build(lazy(), worker_index=len(sys.argv) - 1, num_workers=9)
            print(fetch(built, BatchRequest(spec=lazy(), work=IndexedWork((5, 2)), seed=1, epoch=0, position=0)))
        """)
    )
    outputs = [
        subprocess.run(
            [sys.executable, script, *arguments], capture_output=True, text=True, timeout=100, check=True
        ).stdout
        for arguments in ([], ["early"])
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("[([0.")


IMPORTERS = ["factory", "worker_init_fn", "sample", "collate_fn"]
IMPORTING = """
    import sys
    import hetero.datasets
    from hetero.batches.fetch import describe, fetch
    from hetero.batches.indexed import IndexedWork
    from hetero.batches.request import BatchRequest
    from hetero.datasets import build, dataset

    early = sys.argv[1] == "early"
    drawn = []

    def draw(place):
        if place == importer or place == 1:
            import torch, torch.utils.data
            info = torch.utils.data.get_worker_info()
            drawn.append([*torch.rand(2).tolist(), info and info.id])
            return drawn[-1]

    class Samples:
        def __len__(self): return 1
        def __getitem__(self, index): return draw("sample")

    def collate(samples):
        return samples, draw("collate_fn")

    @dataset(collate_fn=collate)
    def lazy():
        draw("factory")
        return Samples()

    @dataset(collate_fn=collate, worker_init_fn=draw)
    def lazy_with_init():
        return Samples()

    if early:
        import torch
    for importer in sys.argv[2:]:
        assert ("torch" in sys.modules) == early
        spec = lazy_with_init() if importer == "worker_init_fn" else lazy()
        built = build(spec, worker_index=1, num_workers=2)
        batch = fetch(built, BatchRequest(spec=spec, work=IndexedWork((0,)), seed=1, epoch=0, position=0))
        print(drawn[-1], batch, describe(built).fingerprint)
"""


def run_importing(folder: Path, *arguments: str) -> list[str]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(IMPORTING))
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what a process that has imported torch before draws in each place."""
    lines = run_importing(tmp_path_factory.mktemp("early"), "early", *IMPORTERS)
    return dict(zip(IMPORTERS, lines, strict=True))


@pytest.mark.parametrize("importer", IMPORTERS)
def test_torch_imported_by_the_users_code_is_seeded_as_if_it_had_been_there(
    importer: str, tmp_path: Path, early: dict[str, str]
) -> None:
    (late,) = run_importing(tmp_path, "late", importer)
    assert late == early[importer]
    assert "[0." in late


def test_factory_that_imports_torch_is_run_again_only_if_it_drew_from_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import sys
            from hetero.datasets import build, dataset

            @dataset
            def lazy(draws: bool):
                import torch
                print(torch.rand(1).item() if draws else "built")
                return [1]

            build(lazy(sys.argv[1:] == ["draws"]))
            import torch
            print(torch.rand(1).item())  # not of the key: torch is seeded at random when it is imported
        """)
    )
    plain, drawing, other = (
        subprocess.run(
            [sys.executable, script, *arguments], capture_output=True, text=True, timeout=100, check=True
        ).stdout.split()
        for arguments in ([], ["draws"], ["draws"])
    )
    assert plain[:-1] == ["built"]
    assert len(set(drawing)) == 3
    assert drawing[1] == other[1]
    assert drawing[2] != other[2]
