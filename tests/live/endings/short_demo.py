"""`deploy.demo` of short jobs on a machine that was measured before: SCENARIO RULE FOLDER."""

import sys
from pathlib import Path

from deploy import demo

if __name__ == "__main__":
    scenario, rule, folder = sys.argv[1:]
    demo.FOLDER = Path(folder)
    demo.RULE = Path(rule)
    demo.shipped_for = lambda scenario: rule
    demo.measure = lambda budget: scenario  # type: ignore[assignment]
    demo.main([])
