"""The PyTorch interface: a subclass of torch's `DataLoader` whose batches come from endpoints if the job has them."""

from hetero.loaders.checks import warn_in_process_of_rank
from hetero.loaders.pipeline import answer_lengths, is_remote
from hetero.torch.loader import DataLoader

if is_remote():  # the script may call len(spec) before it makes a loader
    answer_lengths()
warn_in_process_of_rank()

__all__ = ["DataLoader"]
