"""
A plan carried out: each job created when those that it waits for have ended.

Every decision follows from what the cluster shows (`deploy.cluster.attempts`), so a run that goes
on after its client was killed is the same loop over what is there already.
"""

import contextlib
import time
from collections.abc import Callable

from deploy.cluster.attempts import FAILED, RUNNING, SUCCEEDED, WAITING, ClusterObjects, JobAttempt
from deploy.cluster.kube_api import KubeApi
from deploy.cluster.manifests import GIVEN_UP, job_manifest
from deploy.records.recorder import Event, failed_attempt
from env.cluster.cluster_scenario import ClusterScenario
from env.cluster.plan import ClusterPlan, JobPlace
from env.errors import InputError

MOST_ATTEMPTS = 3

WAIT_S = 120.0
"""How long an attempt may wait for a node or an image before it counts as failed [s]."""

AGAIN_S = 5.0
"""How long after the server has refused to create a Job it is asked again [s]."""

SETTLE_S = 10.0
"""How long a Job that was created may be missing from what the watches tell [s]."""


class PlacementRun:
    """
    One run of a plan.

    :param plan: the plan
    :param cluster: its scenario
    :param api: the API server
    :param namespace: where everything is
    :param objects: what is there already
    """

    def __init__(
        self,
        plan: ClusterPlan,
        cluster: ClusterScenario,
        api: KubeApi,
        namespace: str,
        objects: ClusterObjects,
    ):
        self.plan, self.cluster, self.api, self.namespace = plan, cluster, api, namespace
        self.objects = objects
        self.attempts: dict[str, list[JobAttempt]] = objects.attempts()
        self._tell: Callable[[Event], None] = lambda event: None
        self._told: set[tuple[str, int, str, str]] = set()
        self._created: dict[str, tuple[int, float]] = {}
        self._refused: dict[str, tuple[float, float]] = {}
        self._asked_s: dict[str, float] = {}
        self._lost: set[str] = set()

    def listen(self, tell: Callable[[Event], None]) -> None:
        """
        Say who is told of what happens.

        :param tell: receives each event, as it happens
        """
        self._tell = tell

    def run(self) -> None:
        """Create what may start, until nothing runs and nothing more may start."""
        self.step()
        for _ in self.api.changes(self.namespace, self.objects):
            self.step()
            if self.over:
                return

    def step(self) -> None:
        """Look at the cluster once, and do what follows from it."""
        self.attempts = self.objects.attempts()
        for tries in self.attempts.values():
            for attempt in tries:
                self._tell_of(attempt)
        for place in self.plan.jobs:
            self._tend(place)

    @property
    def began_s(self) -> float:
        """When the first attempt was created, by the cluster's clock [s of the epoch]."""
        firsts = [tries[0].created_s for tries in self.attempts.values()]
        return min(firsts, default=time.time())

    @property
    def over(self) -> bool:
        """Whether every job has succeeded, or cannot any more."""
        return all(self.ended(place.name) or self._is_held(place) for place in self.plan.jobs)

    def ended(self, job: str) -> bool:
        """
        Whether a job has succeeded, or been given up.

        :param job: its name
        """
        tries = self.attempts.get(job)
        last = tries[-1] if tries else None
        return job in self._lost or (
            last is not None
            and (last.state == SUCCEEDED or (last.state == FAILED and last.number >= MOST_ATTEMPTS))
        )

    def succeeded(self, job: str) -> bool:
        """
        Whether a job has succeeded.

        :param job: its name
        """
        return any(attempt.state == SUCCEEDED for attempt in self.attempts.get(job, ()))

    def _is_held(self, place: JobPlace) -> bool:
        """Whether a job never starts because one that it waits for was given up, or is held."""
        return any(
            not self.succeeded(name) and (self.ended(name) or self._is_held(self.plan.job(name)))
            for name in place.after
        )

    def _tend(self, place: JobPlace) -> None:
        """Start a job that may start, anew where its last attempt has failed."""
        tries = self.attempts.get(place.name, [])
        if tries and (tries[-1].state != FAILED):
            self._give_up_waiting(tries[-1])
            return
        number = tries[-1].number if tries else 0
        made, made_s = self._created.get(place.name, (0, 0.0))
        if made > number:  # it was made, and the watches have not told of it yet
            if time.monotonic() - made_s < SETTLE_S:
                return
            number = made
            self._created[place.name] = (0, 0.0)
            self._say(place.name, failed_attempt(number, "somebody has deleted its Job"))
            if number >= MOST_ATTEMPTS:
                self._lost.add(place.name)
        if number >= MOST_ATTEMPTS or not all(map(self.succeeded, place.after)):
            return
        self._create(place, number + 1)

    def _create(self, place: JobPlace, number: int) -> None:
        now_s = time.monotonic()
        first_s, last_s = self._refused.get(place.name, (now_s, -AGAIN_S))
        if now_s < last_s + AGAIN_S:
            return
        manifest = job_manifest(self.plan, self.cluster, place, number, self.namespace)
        try:
            made = self.api.create_job(manifest)  # None: it is there already
        except InputError as error:  # a server that restarts, a quota that is used up
            if now_s > first_s + WAIT_S:
                raise
            self._refused[place.name] = first_s, now_s
            self._say(place.name, str(error))
            return
        self._refused.pop(place.name, None)
        self._created[place.name] = number, time.monotonic()
        if made is not None:
            self.objects.jobs.setdefault(made["metadata"]["name"], made)
            self.attempts = self.objects.attempts()

    def _give_up_waiting(self, attempt: JobAttempt) -> None:
        """End an attempt that has waited too long for a node or an image."""
        waited_s, now_s = time.time() - attempt.created_s, time.monotonic()
        asked_s = self._asked_s.get(attempt.name, -AGAIN_S)
        if not attempt.why or attempt.state != WAITING or waited_s <= WAIT_S:
            return
        if now_s >= asked_s + AGAIN_S:
            self._asked_s[attempt.name] = now_s
            why = f"not started within {WAIT_S:.0f} s: {attempt.why}"
            with contextlib.suppress(InputError):  # asked again, if nothing comes of it
                self.api.give_up(self.namespace, attempt.name, GIVEN_UP, why)

    def _tell_of(self, attempt: JobAttempt) -> None:
        """Tell once of each thing that happened to an attempt."""
        key = attempt.job, attempt.number, attempt.state, attempt.why
        if key in self._told:
            return
        self._told.add(key)
        place = self.plan.job(attempt.job)
        running = *key[:2], RUNNING, ""
        if attempt.state == RUNNING or (attempt.started_s and running not in self._told):
            self._told.add(running)
            at_s = self._at(attempt.started_s)
            self._tell(Event(at_s, "start", attempt.job, place.vcpus, place.threads))
        if attempt.state == SUCCEEDED:
            self._tell(Event(self._at(attempt.ended_s), "end", attempt.job))
        elif attempt.state == FAILED:
            lines = self.api.last_lines(self.namespace, attempt.pod) if attempt.pod else []
            said = f"{attempt.why}; last lines: {' | '.join(lines)}" if lines else attempt.why
            self._say(attempt.job, failed_attempt(attempt.number, said), attempt.ended_s)
            if attempt.number >= MOST_ATTEMPTS:
                self._say(attempt.job, f"given up after {attempt.number} attempts")
        elif attempt.why:
            self._say(attempt.job, f"waits: {attempt.why}")

    def _say(self, job: str, what: str, moment_s: float | None = None) -> None:
        self._tell(Event(self._at(moment_s), "custom", job, detail=what))

    def _at(self, moment_s: float | None) -> float:
        return (time.time() if moment_s is None else moment_s) - self.began_s
