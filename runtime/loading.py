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
    """Return the batches of a dataset. Each rank gets its own samples of a batch: ``session.step(local=batch)``.

    ``dataset`` has ``dataset[i]`` and a length, or it is an iterable of samples or batches. A sample is a dict by the
    names of the plan's inputs, or a tuple in the order of its ``input`` lines. With ``shuffle`` each epoch has another
    order, chosen by ``seed`` (default: the plan's). ``workers`` is the number of processes of each rank that read
    ahead. The last batch of an epoch may be smaller. If the plan has a range for B, it has its own size. Else it is
    completed by samples whose targets are ignored: its loss is the mean over its own samples. With ``drop_last`` it is
    left out. If a session has several loaders, give each a ``name``: each has its
    own position in checkpoints.

    Raises:
        RunError: the dataset is not one, or is empty, or has less than one batch under ``drop_last``; its last batch is
            smaller, and the completing samples would change the loss; or another dataset has a loader with this name.
    """
    seed = int(session.build.manifest["seed"]) if seed is None else seed
    options: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "workers": workers, "drop_last": drop_last}
    return Loader(session._by_sizes, session._together, dataset, **options, name=name)
