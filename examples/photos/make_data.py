"""Make a data set of real JPEGs from the two photographs that scikit-learn ships.

    python examples/photos/make_data.py --output data/photos --count 2000

Each photograph has four zones, its quarters; each zone of each photograph is
a class. An image is a crop from its zone, moved, scaled and lit at random
and enlarged to about the asked size, so it costs as much to decode as a
photograph of that size. One image in ten is for validation::

    data/photos/manifest.json
    data/photos/train/china-0/000000.jpg
    data/photos/validation/flower-3/000009.jpg

The same flags make the same bytes. A complete data set is kept as it is, and
an interrupted run never leaves half of one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import cv2
import numpy as np
from cv2.typing import MatLike

MANIFEST = "manifest.json"
NUM_ZONES = 4
VALIDATION_EVERY = 10
JPEG_QUALITY = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that decides the bytes of a data set."""

    count: int
    """Number of images for training and validation together. At least 10, because neither may be empty."""
    width: int
    """Mean width of an image in pixels, at least 16. Images differ from it by up to a tenth."""
    height: int
    """Mean height of an image in pixels, at least 16."""
    seed: int
    """Where the random numbers start, >= 0."""

    def __post_init__(self) -> None:
        """Check the bounds."""
        if self.count < VALIDATION_EVERY:
            raise ValueError(f"count is {self.count}, expected at least {VALIDATION_EVERY}")
        if min(self.width, self.height) < 16:
            raise ValueError(f"size is {self.width}x{self.height}, expected at least 16x16")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}, expected at least 0")


def make_photos(output: Path, recipe: Recipe) -> bool:
    """Make the data set ``recipe`` at ``output`` unless it is there already.

    Args:
        output: Folder of the data set. Its parents are created.
        recipe: What to make.

    Returns:
        True if the images were made, False if a complete data set was found.

    Raises:
        FileExistsError: If ``output`` holds something that this script did not make.
    """
    if is_complete(output, recipe):
        return False
    if output.exists() and any(output.iterdir()) and not (output / MANIFEST).is_file():
        raise FileExistsError(f"{output} is not empty and has no {MANIFEST}: choose another --output or remove it")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        build = Path(scratch) / "build"
        write_images(build, recipe)
        if output.exists():
            shutil.rmtree(output)
        try:
            build.rename(output)
        except OSError:
            # Another run of this script was faster.
            if not is_complete(output, recipe):
                raise
            return False
    return True


def is_complete(output: Path, recipe: Recipe) -> bool:
    """Tell whether ``output`` holds every byte of the data set ``recipe``."""
    try:
        manifest = json.loads((output / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return bool(manifest == describe(output, recipe))


def describe(output: Path, recipe: Recipe) -> dict[str, object]:
    """Return what the manifest of the images found in ``output`` has to say."""
    sizes = [path.stat().st_size for path in output.glob("*/*/*.jpg")]
    return {"schema": 1, "recipe": asdict(recipe), "num_images": len(sizes), "num_bytes": sum(sizes)}


def write_images(output: Path, recipe: Recipe) -> None:
    """Write all images and then the manifest. `make_photos` makes this atomic."""
    photographs = load_photographs()
    for split in ("train", "validation"):
        for name in photographs:
            for zone in range(NUM_ZONES):
                (output / split / f"{name}-{zone}").mkdir(parents=True)

    def write(index: int) -> None:
        generator = np.random.default_rng((recipe.seed, index))
        name = sorted(photographs)[generator.integers(len(photographs))]
        zone = int(generator.integers(NUM_ZONES))
        split = "validation" if index % VALIDATION_EVERY == VALIDATION_EVERY - 1 else "train"
        image = crop(photographs[name], zone, recipe, generator)
        encoded, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
        assert encoded, "OpenCV was built without JPEG"
        (output / split / f"{name}-{zone}" / f"{index:06d}.jpg").write_bytes(data.tobytes())

    # OpenCV releases the interpreter's lock, so threads suffice.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(write, range(recipe.count)):
            pass
    (output / MANIFEST).write_text(json.dumps(describe(output, recipe), indent=2) + "\n")


def load_photographs() -> dict[str, MatLike]:
    """Return scikit-learn's photographs by name, 427 x 640 pixels, BGR."""
    # Here because it takes two seconds, which a run that finds its data set need not spend.
    from sklearn.datasets import load_sample_images

    samples = load_sample_images()
    return {
        Path(filename).stem: cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
        for filename, image in zip(samples.filenames, samples.images, strict=True)
    }


def crop(photograph: MatLike, zone: int, recipe: Recipe, generator: np.random.Generator) -> MatLike:
    """Cut one image out of a zone of a photograph.

    The crop covers most of a quarter of the photograph and may reach a tenth
    into its neighbours. So zones can be learnt but are not trivial.

    Args:
        photograph: Pixels, ``(height, width, 3)``.
        zone: Which quarter, ``[0, 4)``, in reading order.
        recipe: Gives the size of the image.
        generator: Source of all that is random here.

    Returns:
        Pixels of about ``(recipe.height, recipe.width, 3)``.
    """
    height, width = photograph.shape[:2]
    scale = generator.uniform(0.45, 0.55)
    crop_width, crop_height = round(width * scale), round(height * scale)
    row, column = divmod(zone, 2)
    from_side, from_edge = (round(shift) for shift in generator.uniform(0, 0.1, size=2) * (width, height))
    left = width - crop_width - from_side if column else from_side
    top = height - crop_height - from_edge if row else from_edge
    pixels = photograph[top : top + crop_height, left : left + crop_width]
    stretch = generator.uniform(0.9, 1.1, size=2)
    size = (round(recipe.width * stretch[0]), round(recipe.height * stretch[1]))
    pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_CUBIC)
    return cv2.convertScaleAbs(pixels, alpha=generator.uniform(0.7, 1.2), beta=generator.uniform(0, 30))


def parse_size(text: str) -> tuple[int, int]:
    """Read ``WIDTHxHEIGHT``."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: expected WIDTHxHEIGHT, such as 500x375")
    return int(match[1]), int(match[2])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description="Make JPEGs from the two photographs that scikit-learn ships.", allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, default=Path("data/photos"), help="folder to make (%(default)s)")
    parser.add_argument("--count", type=int, default=2000, help="number of images (%(default)s)")
    parser.add_argument("--size", type=parse_size, default=(500, 375), help="mean WIDTHxHEIGHT in pixels (500x375)")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other crops (%(default)s)")
    args = parser.parse_args(argv)
    try:
        recipe = Recipe(count=args.count, width=args.size[0], height=args.size[1], seed=args.seed)
        made = make_photos(args.output, recipe)
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))
    print(f"{'made' if made else 'found'} {args.count} images in {args.output}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
