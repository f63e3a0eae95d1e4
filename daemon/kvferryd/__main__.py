"""`python -m kvferryd` is `kvferry`."""

import sys

from kvferryd.cli import main

sys.exit(main())
