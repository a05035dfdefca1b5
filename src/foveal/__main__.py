"""Entry point of `python -m foveal`, for where no `foveal` command is on the path."""

import sys

from foveal.cli import main

sys.exit(main())
