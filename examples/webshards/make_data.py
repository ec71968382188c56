"""Write pictures of shapes as tar shards in WebDataset's form, with one PNG and one class per sample.

The folders ``train`` and ``validation`` hold the shards::

    python examples/webshards/make_data.py --output data/webshards
"""

from __future__ import annotations

import argparse
import io
import random
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter

SIZE = 32
"""Height and width of a picture, in pixels."""
CLASSES = ["circle", "square", "triangle", "cross"]


def draw_shape(label: int, generator: random.Random) -> Image.Image:
    """Return a shape of a random size, place and colour on a random ground, a little blurred."""
    ground, colour = (tuple(generator.choices(range(256), k=3)) for _ in range(2))
    image = Image.new("RGB", (SIZE, SIZE), ground)
    draw = ImageDraw.Draw(image)
    radius = generator.randint(6, 11)
    x, y = (generator.randint(radius, SIZE - 1 - radius) for _ in range(2))
    box = (x - radius, y - radius, x + radius, y + radius)
    if CLASSES[label] == "circle":
        draw.ellipse(box, fill=colour)
    elif CLASSES[label] == "square":
        draw.rectangle(box, fill=colour)
    elif CLASSES[label] == "triangle":
        draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
    else:
        draw.line((x - radius, y, x + radius, y), fill=colour, width=4)
        draw.line((x, y - radius, x, y + radius), fill=colour, width=4)
    return image.filter(ImageFilter.GaussianBlur(generator.uniform(0, 1)))


def write_shard(path: Path, count: int) -> None:
    """Write a shard of ``count`` samples. Its path in the data set is the seed."""
    generator = random.Random(f"{path.parent.name}/{path.name}")
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for number in range(count):
            label = generator.randrange(len(CLASSES))
            picture = io.BytesIO()
            draw_shape(label, generator).save(picture, "PNG")
            # Files of one sample follow each other, and differ in the ending only.
            for ending, content in (("png", picture.getvalue()), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{number:06}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Write pictures of shapes as tar shards.", allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path("data/webshards"), help="folder to write (%(default)s)")
    parser.add_argument("--shards", type=int, default=8, help="shards to train on (%(default)s)")
    parser.add_argument("--samples-per-shard", type=int, default=500, help="samples of a shard (%(default)s)")
    args = parser.parse_args(argv)
    if args.shards < 1 or args.samples_per_shard < 1:
        parser.error("--shards and --samples-per-shard: expected at least 1 of each")
    for split, shards in (("train", args.shards), ("validation", 1)):
        (args.output / split).mkdir(parents=True, exist_ok=True)
        for shard in range(shards):
            write_shard(args.output / split / f"{shard:03}.tar", args.samples_per_shard)
    size = sum(path.stat().st_size for path in args.output.glob("*/*.tar"))
    print(f"wrote {args.shards} shards to train on and 1 to validate to {args.output}, {size / 1e6:.1f} MB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
