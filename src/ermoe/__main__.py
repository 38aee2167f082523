"""``python -m ermoe`` is ``ermoe``."""

import sys

from ermoe.cli.main import main

sys.exit(main())
