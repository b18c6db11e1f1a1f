"""python examples/demo"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # a folder that is run is no package: its parent has the package

from demo import main

sys.exit(main())
