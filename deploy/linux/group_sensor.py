"""The memcacheds that serve together, sensed as one; mostly it is one alone, a group of itself."""

from collections import deque
from collections.abc import Sequence

from deploy.linux.sensors import MOST_NEWS, Cpu, ServiceSensor, ThreadClock
from deploy.linux.service_process import Identity
from deploy.linux.stats_connection import HANDED_ON, Requests, VersionConnection, number_in

PROXY = "proxy"
"""What the process that hands requests on is called in messages."""


class GroupSensor:
    """
    What all of them use, and what clients ask of them.

    CPU time and run delay are sums over all. A member that has died adds nothing to the rates, and
    the readings go on without it; without the first one, which clients ask, they grow old. `news`
    has what is out of the ordinary, with the name of whom it is about.

    :param sensors: of each, the first of the one that clients ask
    :param proxy: what that one is if it is a proxy of the others, as in `env.scenario.Service`
    :param replicas: how many of the members hold each key
    """

    def __init__(
        self, sensors: Sequence[ServiceSensor], proxy: str | None = None, replicas: int = 1
    ):
        self.sensors = tuple(sensors)
        self.names = process_names(len(sensors), proxy is not None)
        self.who: tuple[Identity, ...] = ()
        self.cpu: Cpu | None = None
        self.requests: Requests | None = None
        self.qps = self.cpu_cores = 0.0
        self.news: deque[str] = deque(maxlen=MOST_NEWS)
        self._front, *self._others = sensors
        self.proxy = proxy
        if proxy == "memcached":  # members are asked what it was asked
            self._front.stats.counters = HANDED_ON
        elif proxy == "nutcracker":
            self._front.stats = VersionConnection(self._front.stats.host, self._front.stats.port)
        self._replicas = replicas
        self._have_died: set[int] = set()
        self._clocks: list[ThreadClock | None] = [None] * len(sensors)

    def ask(self, now_s: float) -> None:
        """
        Read the CPU times, and ask for the counters.

        :param now_s: the present time [s]
        """
        front = self._front
        front.ask(now_s)
        self.cpu, self.cpu_cores = front.cpu, front.cpu_cores
        for member in self._others:
            member.ask(now_s)
            self._add_cpu(member)

    def receive(self, now_s: float, patience_s: float = 0.0) -> None:
        """
        Take in the counters that were asked for, as far as they are there.

        :param now_s: the present time [s]
        :param patience_s: how long to wait for each one's [s]
        """
        front = self._front
        front.receive(now_s, patience_s)
        self.requests, self.qps = front.requests, front.qps
        changed = front.clock is not self._clocks[0] or front.news
        for place, member in enumerate(self._others, 1):
            member.receive(now_s, patience_s)
            if self.proxy != "memcached":
                self._add_requests(member)
            changed = changed or member.clock is not self._clocks[place] or member.news
        if changed:
            self._note_changes()

    def age_s(self, now_s: float) -> float:
        """
        Age of the oldest reading of those that are counted [s]; infinite before the first.

        :param now_s: the present time [s]
        """
        age_s = self._front.age_s(now_s)
        for member in self._others:
            if member.clock is not None:
                age_s = max(age_s, member.age_s(now_s))
        return age_s

    def close(self) -> None:
        """Hang up and give the file descriptors back."""
        for sensor in self.sensors:
            sensor.close()

    def _add_cpu(self, member: ServiceSensor) -> None:
        so_far, more = self.cpu, member.cpu
        if so_far is None or more is None:
            self.cpu = None
            return
        time_s = so_far.time_s
        if member.clock is not None:
            time_s = min(time_s, more.time_s)
            self.cpu_cores += member.cpu_cores
        delay_s = so_far.run_delay_s + more.run_delay_s
        self.cpu = Cpu(time_s, so_far.cpu_s + more.cpu_s, delay_s)

    def _add_requests(self, member: ServiceSensor) -> None:
        so_far, more = self.requests, member.requests
        if so_far is None or more is None:
            self.requests = None
            return
        time_s = so_far.time_s
        if member.clock is not None:
            time_s = min(time_s, more.time_s)
            self.qps += member.qps
        self.requests = Requests(time_s, so_far.count + more.count)

    def _note_changes(self) -> None:
        """See who is there, and take over what there is to tell."""
        found = [sensor.who for sensor in self.sensors if sensor.who is not None]
        self.who = tuple(found) if len(found) == len(self.sensors) else ()
        for place, (name, sensor) in enumerate(zip(self.names, self.sensors, strict=True)):
            news = list(sensor.news)
            sensor.news.clear()
            if sensor.clock is None and (ended := self._clocks[place]) is not None:
                news.append(f"process {ended.who.pid} has ended; {self._held_by(place)}")
            self._clocks[place] = sensor.clock
            self.news += [f"{name}: {line}" if name else line for line in news]

    def _held_by(self, place: int) -> str:
        """What one that has died held, as far as it last said so, and what is left of it."""
        if self.proxy is not None and place == 0:
            return "its members hold what they held"
        self._have_died.add(place)  # whoever comes after it holds nothing yet
        left = max(0, self._replicas - len(self._have_died))
        answer = self.sensors[place].stats.last
        try:
            items = number_in(answer, b"STAT curr_items ")
            mib = number_in(answer, b"STAT bytes ") / (1 << 20)
        except ValueError:
            return f"what it held is not known; other replicas: {left}"
        return f"it last told of {items} items, {mib:.1f} MiB; other replicas: {left}"


def process_names(processes: int, proxied: bool) -> tuple[str, ...]:
    """
    What each process of a service is called in messages, the one that clients ask first.

    :param processes: how many there are
    :param proxied: whether the first is a proxy
    :return: nothing for the only one
    """
    if processes == 1:
        return ("",)
    members = [f"member {number}" for number in range(1, processes + (not proxied))]
    return (PROXY, *members) if proxied else tuple(members)
