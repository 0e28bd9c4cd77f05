"""The command `python -m deploy.report`; see `deploy.records.run_report`."""

import sys

from deploy.linux.signals import interrupt_on_stop
from deploy.records.run_report import main

if __name__ == "__main__":
    interrupt_on_stop()
    try:
        main()
    except KeyboardInterrupt as stop:  # what draws and predicts has ended by now
        sys.exit(128 + int(stop.args[0]))
