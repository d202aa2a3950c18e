"""``python -m parc``: the command line."""

import sys

from parc.cli import main

sys.exit(main())
