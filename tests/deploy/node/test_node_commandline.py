"""What goes with `--node` and what does not is said in one line."""

from __future__ import annotations

import pytest

from deploy.commands import main
from deploy.safety.guardian import Guardian


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--node", "a", "--queue", "q"], "--node takes no --queue"),
        (["--node", "a", "--cluster", "plan"], "--node takes no --cluster"),
        (["--node", "a", "--dry-run"], "--node takes no --dry-run"),
        (["--node", "a", "--leave-jobs"], "--node takes no --leave-jobs"),
        (["--kubeconfig", "k"], "--kubeconfig needs --cluster PLAN or --node NAME"),
        (["--cluster-scenario", "c"], "--cluster-scenario needs --cluster PLAN"),
        (["--node", "a", "--kubeconfig", "/none/such"], "/none/such: no such kubeconfig"),
    ],
)
def test_a_line_names_what_does_not_go_together(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "/none/such" in options:
        pytest.importorskip("kubernetes")
    with pytest.raises(SystemExit) as refused:
        main([*options, "--policy", "first-come"], Guardian(0, -1))
    assert refused.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
