"""`python -m foveal.cli`."""

import sys

from foveal.cli.main import main

sys.exit(main())
