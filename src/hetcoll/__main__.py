"""`python -m hetcoll` is the `hetcoll` command."""

import sys

from .cli import main

sys.exit(main())
