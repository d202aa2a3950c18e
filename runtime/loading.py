"""``parc.dataloader``: the batches of a dataset for a person's own loop."""

from __future__ import annotations

from typing import Any

from .data.loader import Loader
from .session import Session


def dataloader(
    session: Session,
    dataset: Any,
    *,
    shuffle: bool = False,
    seed: int | None = None,
    workers: int = 0,
    drop_last: bool = False,
    name: str = "data",
) -> Loader:
    """Return the batches of a dataset, of which each rank gets its own samples: ``session.step(local=batch)``.

    ``dataset`` has ``dataset[i]`` and a length, or is an iterable of samples or batches; a sample is a dict by the
    names of the plan's inputs, or a tuple in the order of its ``input`` lines. ``shuffle`` gives each epoch another
    order, by ``seed`` (the plan's, if none is given). ``workers`` are processes of each rank that read ahead. The last
    batch of an epoch is completed by samples whose targets are ignored, so that its loss is the mean over those that
    are there; ``drop_last`` leaves it out. A session that has several loaders names them: each has its own place in
    checkpoints.

    Raises:
        RunError: the dataset is none, or has too few samples; its last batch is smaller, and the loss sees that; or
            another dataset has a loader of this name.
    """
    seed = int(session.build.manifest["seed"]) if seed is None else seed
    options: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "workers": workers, "drop_last": drop_last}
    return Loader(session.feed, session._together, dataset, **options, name=name)
