"""
The network for any scenario, run with NumPy: it sees tokens and says which list to follow.

It is asked when a job arrives or ends. In between its list is followed, edit by edit.
"""

from pathlib import Path

from agents.general_checkpoint import GeneralCheckpoint, read_general_checkpoint
from agents.ppo.attention_network import SingleAttention
from agents.ppo.trained_policy import TrainedPolicy
from env.codes import RUNNING
from env.control import ControlState, carried_over
from env.lists.following import jobs_there, list_edit
from env.lists.menu import LIST_SERVED, LISTS, list_table
from env.scenario import Scenario, profile_work_s
from env.sets.tokens import note_use_of_jobs, token_table, write_tokens
from env.telemetry import Telemetry


class GeneralPolicy(TrainedPolicy):
    """
    A trained policy for any scenario, behind the `Policy` protocol.

    :param checkpoint: what to run
    :param name: what tables call it
    """

    def __init__(self, checkpoint: GeneralCheckpoint, name: str):
        super().__init__(name)
        self.checkpoint = checkpoint

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> "GeneralPolicy":
        """
        Read a policy.

        :param path: a checkpoint's path, or its name in `checkpoints/`
        :raises InputError: if the file is not a checkpoint this version can run
        """
        return cls(read_general_checkpoint(path), name=str(path))

    def reset(self, scenario: Scenario) -> None:
        """
        Begin an episode.

        :param scenario: the problem; one without jobs will get some later
        """
        self._arrivals = scenario.has_arrivals or not scenario.jobs
        self._asked: frozenset[str] | None = None
        self._list: tuple[int, int, int, float] = (0, 0, 0, 0.0)
        self._take_on(scenario)

    def _take_on(self, scenario: Scenario) -> None:
        """Begin with the scenario's jobs, which may change later; whether jobs arrive does not."""
        layout = self.checkpoint.layout(scenario)
        self._begin(scenario, profile_work_s(scenario.profile))
        table = token_table(scenario, layout, self._arrivals)
        self._attention = SingleAttention(self.checkpoint.arrays, table)
        self._offsets, self._blank = layout.offsets, table.blank
        lists = list_table(scenario, table.edits)
        self._legal = lists.legal
        # Python's own numbers are faster, one by one.
        self._sets, self._slot_of = table.sets.astype(object), table.slot_of.tolist()
        self._to_follow = (
            self._rows,
            lists.starts.astype(object),
            lists.places.astype(object),
            lists.pauses.tolist(),
            lists.sets.astype(object),
            lists.usual,
        )
        self._there = -1

    def change_jobs(self, scenario: Scenario) -> None:
        """
        Go on with other jobs.

        :param scenario: the one of `reset` with other jobs
        """
        before, known, first = self._scenario, self._control, self._first
        self._take_on(scenario)
        self._first = first
        control = carried_over(known, before, scenario, profile_work_s(scenario.profile))
        for job, state in enumerate(control.desired_state):
            if state == RUNNING:
                place = control.desired_set[job], control.desired_weight[job]
                control.desired_place[job] = self._place_of(job, *place)
        self._control = control

    def _choose(self, control: ControlState) -> int:
        note_use_of_jobs(control)
        n_jobs = len(self._names)
        there = jobs_there(control, n_jobs)
        if there != self._there:
            names = frozenset(name for job, name in enumerate(self._names) if there >> job & 1)
            if names != self._asked:
                self._asked, self._list = names, self._best_list(control)
            # Last: where the loop interrupts a late answer, the network has to be asked again.
            self._there = there
        edit: int = list_edit(control, n_jobs, *self._to_follow, *self._list, self._arrivals)
        return edit

    def _best_list(self, control: ControlState) -> tuple[int, int, int, float]:
        """The list that the network likes best now, as `list_edit` wants it."""
        self._attention.row[:] = self._blank
        write_tokens(control, self._sets, self._slot_of, self._offsets, self._attention.tokens)
        chosen = self._attention.choose(self._legal)
        at_once, front, share = LISTS[chosen].tolist()
        return at_once, front, share, float(LIST_SERVED[chosen])

    def _read(self, telemetry: Telemetry) -> None:
        super()._read(telemetry)
        self._control.vcpu_busy_s = telemetry.vcpu_busy_s
