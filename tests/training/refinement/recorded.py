"""A run recorded on a VM of two vCPUs, before the larger vCPU set was for overflowing."""

import json
import shutil
from pathlib import Path

RUN = Path(__file__).with_name("run")


def in_the_present_form(folder: Path) -> Path:
    """
    A copy of it, whose scenario calls the larger of the same vCPU sets overflow.

    :param folder: where the copy goes
    """
    run = shutil.copytree(RUN, folder / "run")
    scenario = json.loads((run / "scenario.json").read_text())
    scenario["service"] |= {"core_choices": [[0]], "overflow_cores": [0, 1]}
    (run / "scenario.json").write_text(json.dumps(scenario))
    return run
