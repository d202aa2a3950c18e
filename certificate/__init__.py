"""The independent checker of builds: it proves from a build's texts alone that all roles together compute what
``programs/model.py`` says. It imports nothing of parc, torch or sympy, so it shares no mistake with what it checks.
"""

from hashlib import sha256
from pathlib import Path

FORMAT = 7
"""The format of the builds that are read; those of another one are refused."""


def _digest() -> str:
    """Return some digits of a hash of the checker's own sources: its rows, and its normal form."""
    sources = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".py", ".txt"))
    return sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:6]


VERSION = f"{FORMAT}.{_digest()}"
"""The version of the checker: the format of builds that it reads, and a hash of its sources. So no two checkers that
accept different builds have one version."""
