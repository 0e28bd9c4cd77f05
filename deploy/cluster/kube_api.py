"""
The cluster's API server, by the official client: what is refused becomes one line.

Objects are plain mappings as the server sends them, and paths are written out: the client's own
classes of both take 20 MiB. Two long-lived watches tell of every change; a watch that breaks is
begun anew from a list, so that nothing is missed.
"""

import contextlib
import json
import os
import queue
import ssl  # noqa: F401  (before Docker's SDK, which would leave it out for all)
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from deploy.cluster.attempts import ClusterObjects
from deploy.cluster.manifests import OURS, Manifest
from env.errors import InputError

if TYPE_CHECKING:
    from kubernetes import client

NODES, NAMESPACES, ALL_PODS = "/api/v1/nodes", "/api/v1/namespaces", "/api/v1/pods"

WATCH_S = 300
"""How long one watch lasts before it is begun anew [s]."""

TICK_S = 1.0
"""How long a change is waited for before the clock is looked at [s]."""

FIRST_BACK_OFF_S, LAST_BACK_OFF_S = 1.0, 30.0
LOG_LINES = 5
CALL_S = 20.0
"""How long a call may take [s]."""


def connect(kubeconfig: Path | None) -> "KubeApi":
    """
    Connect to the cluster that a kubeconfig names.

    :param kubeconfig: the file; None takes what kubectl would, in a pod its account
    :raises InputError: if the client is not installed, or the file is not one
    """
    try:
        import urllib3
        from kubernetes import client, config
    except ImportError as error:
        raise InputError(
            "a cluster needs the Kubernetes client: install coretide[cluster]"
        ) from error
    if kubeconfig is not None and not kubeconfig.is_file():
        raise InputError(f"{kubeconfig}: no such kubeconfig")
    try:
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config()
        else:
            config.load_kube_config(str(kubeconfig) if kubeconfig else None)
    except Exception as error:  # YAML's, the client's own, and those of plugins
        where = kubeconfig or "no kubeconfig: give one with --kubeconfig"
        raise InputError(f"{where}: {' '.join(str(error).split())}") from error
    configuration = client.Configuration.get_default_copy()
    configuration.retries = False
    if not configuration.verify_ssl:
        # The kubeconfig asks for that, and kubectl says nothing of it either.
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    return KubeApi(client.ApiClient(configuration))


class KubeApi:
    """
    What a run asks of the API server.

    :param api_client: a connection
    """

    def __init__(self, api_client: "client.ApiClient"):
        self._client = api_client
        self.host: str = api_client.configuration.host
        self.calls = 0

    def nodes(self) -> list[dict[str, Any]]:
        """All nodes of the cluster."""
        return list(self._call("nodes", "GET", NODES)["items"])

    def namespace(self, name: str) -> dict[str, Any] | None:
        """
        A namespace, or None if it does not exist.

        :param name: its name
        """
        try:
            return self._call(f"namespace {name}", "GET", f"{NAMESPACES}/{quote(name, safe='')}")
        except KeyError:
            return None

    def create_namespace(self, manifest: Manifest) -> None:
        """
        Create a namespace.

        :param manifest: the namespace
        """
        self._call("namespaces", "POST", NAMESPACES, manifest)

    def objects(self, namespace: str) -> ClusterObjects:
        """
        The Jobs and pods of ours in a namespace.

        :param namespace: its name
        """
        jobs = self._call("jobs", "GET", _jobs(namespace), labelSelector=OURS)
        pods = self._call("pods", "GET", _pods(namespace), labelSelector=OURS)
        return ClusterObjects(_by_name(jobs["items"]), _by_name(pods["items"]))

    def create_job(self, manifest: Manifest) -> dict[str, Any] | None:
        """
        Create a Job; None if it is there already.

        :param manifest: the Job
        """
        meta = manifest["metadata"]
        try:
            return self._call(f"job {meta['name']}", "POST", _jobs(meta["namespace"]), manifest)
        except FileExistsError:
            return None

    def give_up(self, namespace: str, name: str, annotation: str, why: str) -> None:
        """
        End an attempt whose pod never ran; the Job stays, and says why.

        :param namespace: where it is
        :param name: the Job's
        :param annotation: the annotation's key
        :param why: its value
        """
        change = {"metadata": {"annotations": {annotation: why}}, "spec": {"suspend": True}}
        with contextlib.suppress(KeyError):
            self._call(f"job {name}", "PATCH", f"{_jobs(namespace)}/{name}", change)

    def delete_job(self, namespace: str, name: str) -> None:
        """
        Delete a Job and its pods; one that is gone is no fault.

        :param namespace: where it is
        :param name: the Job's
        """
        with contextlib.suppress(KeyError):
            how = {"propagationPolicy": "Background"}
            self._call(f"job {name}", "DELETE", f"{_jobs(namespace)}/{name}", how)

    def last_lines(self, namespace: str, pod: str) -> list[str]:
        """
        The last lines that a pod has written; none where they cannot be read.

        :param namespace: where it is
        :param pod: its name
        """
        try:
            path = f"{_pods(namespace)}/{pod}/log"
            answer = self._ask("GET", path, None, CALL_S, tailLines=str(LOG_LINES))
            return str(answer.data.decode(errors="replace")).splitlines()[-LOG_LINES:]
        except Exception:  # a log is a help, and whatever keeps it back no reason to stop
            return []

    def changes(self, namespace: str, objects: ClusterObjects) -> Iterator[None]:
        """
        Keep objects up to date; yields after changes, and at least every `TICK_S`.

        :param namespace: where they are
        :param objects: what is kept up to date
        """
        selection = {"labelSelector": OURS}
        for _ in self._follow(
            Watched(objects.jobs, _jobs(namespace), selection),
            Watched(objects.pods, _pods(namespace), selection),
        ):
            yield

    def node_pods(self, node: str, label: str, kept: dict[str, Any]) -> Iterator[bool]:
        """
        Keep up to date which pods of a node have a label; yields as `changes` does.

        :param node: its name
        :param label: the label's key
        :param kept: the pods, by namespace and name
        :return: yields whether anything has changed
        :raises InputError: if the server cannot be reached, or refuses
        """
        selection = {"fieldSelector": f"spec.nodeName={node}", "labelSelector": label}
        self._call("pods", "GET", ALL_PODS, limit="1", **selection)  # refused: said at once
        yield from self._follow(Watched(kept, ALL_PODS, selection, _full_name))

    def _follow(self, *all_watched: "Watched") -> Iterator[bool]:
        """Keep things up to date; yields whether any has changed, at least every `TICK_S`."""
        told: queue.Queue[tuple[Watched, str, Any]] = queue.Queue()
        stop = threading.Event()
        for watched in all_watched:
            arguments = (watched, told, stop)
            threading.Thread(target=self._watch, args=arguments, daemon=True).start()
        try:
            while True:
                changed = False
                with contextlib.suppress(queue.Empty):
                    _take(*told.get(timeout=TICK_S))
                    changed = True
                    while True:
                        _take(*told.get_nowait())
                yield changed
        finally:
            stop.set()

    def _watch(
        self,
        watched: "Watched",
        told: "queue.Queue[tuple[Watched, str, Any]]",
        stop: threading.Event,
    ) -> None:
        """One watch, begun anew from a list whenever it breaks."""
        wait_s = FIRST_BACK_OFF_S
        while not stop.is_set():
            try:
                listed = self._call("watch", "GET", watched.path, **watched.selection)
                told.put((watched, "ALL", listed["items"]))
                wait_s = FIRST_BACK_OFF_S
                with self._ask(
                    "GET",
                    watched.path,
                    None,
                    WATCH_S + CALL_S,
                    watch="true",
                    resourceVersion=listed["metadata"]["resourceVersion"],
                    timeoutSeconds=str(WATCH_S),
                    **watched.selection,
                ) as answer:
                    for line in answer:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            raise ValueError(event["object"])
                        told.put((watched, event["type"], event["object"]))
            except Exception:  # the server is away, or no longer knows the version: list again
                stop.wait(wait_s)
                wait_s = min(2.0 * wait_s, LAST_BACK_OFF_S)

    def _call(
        self, what: str, method: str, path: str, sent: Any = None, **asked: str
    ) -> dict[str, Any]:
        """
        What the server answers, as a mapping.

        :raises KeyError: if there is no such thing
        :raises FileExistsError: if there is one already
        :raises InputError: if the server cannot be reached, or refuses
        """
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            found: dict[str, Any] = json.loads(self._ask(method, path, sent, CALL_S, **asked).data)
            return found
        except ApiException as error:
            if error.status == 404:
                raise KeyError(what) from error
            if error.status == 409:
                raise FileExistsError(what) from error
            raise InputError(f"{self.host}: {what}: {_refusal(error)}") from error
        except (HTTPError, OSError, ValueError) as error:
            why = _why(error)
            raise InputError(f"{self.host}: {what}: no answer ({why})") from error

    def _ask(self, method: str, path: str, sent: Any, limit_s: float, **asked: str) -> Any:
        """
        The server's answer, of which nothing has been read yet.

        :raises ApiException: if it refuses
        """
        from kubernetes.client.exceptions import ApiException

        self.calls += 1
        kind = "merge-patch+json" if method == "PATCH" else "json"
        request = self._client.param_serialize(
            method,
            path,
            query_params=list(asked.items()),
            header_params={"Accept": "application/json", "Content-Type": f"application/{kind}"},
            body=sent,
            auth_settings=["BearerToken"],
        )
        answer = self._client.call_api(*request, _request_timeout=limit_s)
        if not 200 <= answer.status <= 299:
            answer.read()
            raise ApiException(http_resp=answer)
        return answer.response


def _jobs(namespace: str) -> str:
    return f"/apis/batch/v1/namespaces/{quote(namespace, safe='')}/jobs"


def _pods(namespace: str) -> str:
    return f"{NAMESPACES}/{quote(namespace, safe='')}/pods"


def _name(one: dict[str, Any]) -> str:
    return str(one["metadata"]["name"])


def _full_name(one: dict[str, Any]) -> str:
    return f"{one['metadata']['namespace']}/{one['metadata']['name']}"


@dataclass(frozen=True)
class Watched:
    """
    What one watch keeps up to date.

    :param kept: the objects, by `key`
    :param path: where they are listed
    :param selection: which of them
    :param key: what tells one of them from another
    """

    kept: dict[str, Any]
    path: str
    selection: dict[str, str]
    key: Callable[[dict[str, Any]], str] = _name


def _take(watched: Watched, kind: str, told: Any) -> None:
    kept, key = watched.kept, watched.key
    if kind == "ALL":
        kept.clear()
        kept.update({key(one): one for one in told})
    elif kind == "DELETED":
        kept.pop(key(told), None)
    else:
        kept[key(told)] = told


def _by_name(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {_name(one): one for one in items}


def _refusal(error: Any) -> str:
    """What the server says, on one line."""
    try:
        said = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        said = error.reason
    return f"refused ({error.status}): {' '.join(str(said).split())}"


def _why(error: BaseException) -> str:
    """What kept an answer away: the system's words, or the client's without a class's name."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror.lower()
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split()).rpartition("): ")[2]
