import sys

from kvferryd.demo import main

sys.exit(main())
