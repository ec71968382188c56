"""The data set of the example. Data hosts import this file."""

import numpy as np
import torch
from torch.utils.data import Dataset

import hetero


class Squares(Dataset):
    """Noisy images of a square. The class is the quarter of the image that the square is in."""

    def __init__(self, num_images: int) -> None:
        self.num_images = num_images

    def __len__(self) -> int:
        """Return the number of images."""
        return self.num_images

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return an image of shape (1, 28, 28), float32, and its class."""
        label = index % 4
        image = np.random.rand(28, 28).astype(np.float32)  # hetero seeds NumPy for each sample
        row, column = 14 * (label // 2), 14 * (label % 2)
        image[row + 2 : row + 12, column + 2 : column + 12] += 1.0
        return torch.from_numpy(image)[None], label


@hetero.dataset
def squares(num_images: int) -> Dataset:
    """Return the data set."""
    return Squares(num_images)
