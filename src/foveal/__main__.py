"""`python -m foveal`, where no `foveal` is on the path."""

import sys

from foveal.cli import main

sys.exit(main())
