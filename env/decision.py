"""
One decision: from what a policy chose to the allocation that is sent.

The simulator, the trained policy and the real machine decide by these functions, compiled in
the kernel and plain Python elsewhere. A policy chooses an edit or a whole allocation; both are
written into the control row as desired, and the regulator settles what becomes of them.
"""

from env.action import apply_edit, resolve_sets
from env.regulator import pass_through, regulate_jobs, regulate_service


def regulate_again(control):
    """
    Regulate the desired allocation that stands, as the guard has it done between decisions.

    :param control: a control row (`env.control`)
    """
    regulate_service(control)
    if control.edited:
        resolve_sets(control)
    regulate_jobs(control)
    control.settled = control.overruled_reasons == 0


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
    control.guarded = control.edited = 1
    apply_edit(control, rows, edit)
    if control.kept and control.settled:
        return False
    regulate_again(control)
    return True


def decide_allocation(control, regulator_on):
    """
    Regulate the desired allocation that `env.control.set_desired` wrote.

    :param control: a control row (`env.control`)
    :param regulator_on: False lets the desired allocation through as it is
    """
    control.edited = 0
    if regulator_on:
        control.guarded = 1
        regulate_again(control)
    else:
        pass_through(control)
    control.settled = 0  # the next edit resolves the jobs' sets anew
