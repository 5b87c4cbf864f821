"""`python -m tq_calibrate`: the command where its script may not be on the path."""

import sys

from .cli import main

sys.exit(main())
