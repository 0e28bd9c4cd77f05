"""
One decision: from what a policy chose to the allocation that is sent.

The simulator, the trained policy and the real machine decide by these two functions, compiled in
the kernel and plain Python elsewhere. A policy chooses an edit or a whole allocation; both are
written into the control row as desired, and the regulator settles what becomes of them.
"""

from env.action import apply_edit, resolve_sets
from env.regulator import pass_through, regulate_jobs, regulate_service


def decide_edit(control, rows, edit):
    """
    Apply one edit to the desired allocation and regulate the outcome.

    Most edits keep. After one that keeps, a settled row is left alone, because regulating it again
    would change nothing.

    :param control: a control row (`env.control`)
    :param rows: int64[n_edits, 7], see `env.action.EditTable`
    :param edit: index of the edit
    :return: whether the allocation was regulated, and so may have to be sent
    """
    apply_edit(control, rows, edit)
    if control.kept and control.settled:
        return False
    regulate_service(control)
    resolve_sets(control)
    regulate_jobs(control)
    control.settled = control.overruled_reasons == 0
    return True


def decide_allocation(control, regulator_on):
    """
    Regulate the desired allocation that `env.control.set_desired` wrote.

    :param control: a control row (`env.control`)
    :param regulator_on: False lets the desired allocation through as it is
    """
    if regulator_on:
        regulate_service(control)
        regulate_jobs(control)
    else:
        pass_through(control)
    control.settled = 0  # the next edit resolves the jobs' sets anew
