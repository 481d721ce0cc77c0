"""Which sample a step trains on, and the one number that says how far a job has read.

The corpus is a sequence of bytes. It is cut into samples of `seq_len + 1` bytes; each epoch visits every
sample once, in an order drawn from (seed, epoch). Laid end to end, the epochs are one endless sequence of
sample ids, and the job's position in it is a single integer: the number of samples consumed so far by all
ranks together. Nothing per rank or per loader worker is saved, so a restart on any number of ranks neither
repeats nor drops a sample. (A loader that snapshots its workers' state cannot do that: it must come back
with the same world size and the same number of workers.)
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from ridethrough.config import JobConfig
from ridethrough.job.corpus import Corpus


class Sampler:
    """The endless sequence of sample ids, readable from any position.

    Args:
        samples: how many samples the corpus has.
        seed: of the shuffle.
    """

    def __init__(self, samples: int, seed: int) -> None:
        self.samples, self.seed = samples, seed
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def ids(self, start: int, count: int) -> list[int]:
        """Ids at positions start … start + count − 1, across epochs where need be."""
        return [
            int(self._epoch_order(at // self.samples)[at % self.samples])
            for at in range(start, start + count)
        ]

    def _epoch_order(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            digest = hashlib.sha256(f"{self.seed}:{epoch}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
            self._epoch, self._order = epoch, torch.randperm(self.samples, generator=generator)
        return self._order


class Batches:
    """This rank's part of each global batch; `next_sample` is all there is to save.

    A global batch is the next `global_batch` ids of the sequence; rank r of w takes the r-th of w equal
    slices. Which samples a step trains on so depends on the position alone, never on the world size.

    Args:
        corpus: the text.
        config: how it is cut, shuffled and batched.
        rank: this rank.
        world_size: how many ranks share a batch; must divide `config.global_batch`.

    Attributes:
        next_sample: samples consumed so far by all ranks together.
        last_ids: this rank's sample ids of the newest batch.

    Raises:
        UsageError: if the ranks cannot share a batch equally, or the corpus is shorter than a sample.
    """

    def __init__(self, corpus: Corpus, config: JobConfig, rank: int, world_size: int) -> None:
        self.tokens = np.frombuffer(corpus.text, np.uint8)
        self.sampler = Sampler(corpus.samples(config.seq_len), config.seed)
        self.seq_len, self.global_batch = config.seq_len, config.global_batch
        self.share = config.share(world_size)
        self.offset = rank * self.share
        self.next_sample = 0
        self.last_ids: list[int] = []

    def next(self) -> Tensor:
        """The next batch's share of this rank: (share, seq_len + 1) of int64 token ids."""
        self.last_ids = self.sampler.ids(self.next_sample + self.offset, self.share)
        self.next_sample += self.global_batch
        starts = np.array(self.last_ids)[:, None] * self.seq_len
        return torch.from_numpy(self.tokens[starts + np.arange(self.seq_len + 1)].astype(np.int64))
