"""A plugin made for a core that is long gone; importing it would leave a trace."""

import os
from pathlib import Path

Path(os.environ["MINI_OLD_API_TRACE"]).touch()
