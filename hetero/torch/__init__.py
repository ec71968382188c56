"""The PyTorch face: a `DataLoader` that is torch's, with batches from endpoints where the job has some."""

from hetero.loaders.checks import warn_in_process_of_rank
from hetero.loaders.pipeline import answer_lengths, is_remote
from hetero.torch.loader import DataLoader

if is_remote():  # the script may ask before it makes a loader
    answer_lengths()
warn_in_process_of_rank()

__all__ = ["DataLoader"]
