"""What `deploy.py --cluster` does: run a plan, go on with it, show or undo it."""

import argparse

import yaml

from deploy.cluster.attempts import ClusterObjects
from deploy.cluster.cluster_check import require_images, require_namespace, require_nodes
from deploy.cluster.cluster_report import write_cluster_report
from deploy.cluster.cluster_view import shown
from deploy.cluster.kube_api import KubeApi, connect
from deploy.cluster.manifests import PLAN, digest, job_manifest, namespace_manifest
from deploy.cluster.placement_run import PlacementRun
from deploy.records.recorder import set_aside
from deploy.records.terminal import say
from env.cluster.cluster_scenario import ClusterScenario, load_cluster
from env.cluster.plan import ClusterPlan, check_plan, load_plan
from env.errors import InputError
from env.inputs.commandline import require_folder

EXIT_OK, EXIT_FAILED = 0, 1


def run_on_cluster(arguments: argparse.Namespace) -> int:
    """
    Do as the command line says.

    :param arguments: what it read
    :return: the exit code: 0 if every job has succeeded and nothing of ours is left
    :raises InputError: if it cannot begin; nothing is created then
    """
    plan = load_plan(arguments.cluster)
    cluster = load_cluster(arguments.cluster_scenario or plan.scenario)
    check_plan(plan, cluster, arguments.cluster)
    require_images(plan, cluster)
    namespace: str = arguments.namespace
    if arguments.dry_run:
        print(manifests_text(plan, cluster, namespace), end="")
        return EXIT_OK
    api = connect(arguments.kubeconfig)
    is_there = require_namespace(api, namespace)
    objects = api.objects(namespace) if is_there else ClusterObjects()
    if arguments.restore:
        return _restore(api, namespace, objects)
    _require_state(objects, plan, namespace, arguments.resume)
    require_nodes(api, plan, cluster)
    if arguments.check:
        print(f"{api.host}: fit for {plan.name}")
        return EXIT_OK
    require_folder(arguments.report)
    set_aside(arguments.report)
    if not is_there:
        api.create_namespace(namespace_manifest(namespace))
    run = PlacementRun(plan, cluster, api, namespace, objects)
    with shown(run) as events:
        try:
            run.run()
        except InputError as error:
            raise InputError(f"{error}; use --resume to go on, or --restore") from error
    restored = _delete(api, namespace, run.objects)
    write_cluster_report(arguments.report, run, events, restored)
    failed = [place.name for place in plan.jobs if not run.succeeded(place.name)]
    if failed:
        say(f"not done: {', '.join(failed)}; see {arguments.report}")
    return EXIT_FAILED if failed or not restored else EXIT_OK


def manifests_text(plan: ClusterPlan, cluster: ClusterScenario, namespace: str) -> str:
    """
    All that a run without a fault creates, as `kubectl apply` takes it.

    :param plan: the plan
    :param cluster: its scenario
    :param namespace: where it is created
    """
    jobs = [job_manifest(plan, cluster, place, 1, namespace) for place in plan.jobs]
    return yaml.safe_dump_all([namespace_manifest(namespace), *jobs], sort_keys=False)


def _require_state(
    objects: ClusterObjects, plan: ClusterPlan, namespace: str, resume: bool
) -> None:
    """Refuse to begin over an earlier run, or to go on with none or another plan's."""
    if not objects.jobs:
        if resume:
            raise InputError(f"namespace {namespace}: nothing to resume: it has no job of ours")
        return
    if not resume:
        raise InputError(
            f"namespace {namespace}: has {len(objects.jobs)} jobs of an earlier run; "
            "use --resume to go on with it, or --restore to delete them"
        )
    for name, job in sorted(objects.jobs.items()):
        if job["metadata"]["labels"].get(PLAN) != digest(plan):
            raise InputError(
                f"namespace {namespace}: job {name} is another plan's; resume with that plan, "
                "or use --restore to delete it"
            )


def _restore(api: KubeApi, namespace: str, objects: ClusterObjects) -> int:
    if not objects.jobs:
        print(f"namespace {namespace}: nothing to restore")
        return EXIT_OK
    restored = _delete(api, namespace, objects)
    print(f"namespace {namespace}: {len(objects.jobs)} jobs of ours deleted")
    return EXIT_OK if restored else EXIT_FAILED


def _delete(api: KubeApi, namespace: str, objects: ClusterObjects) -> bool:
    """Delete every Job of ours, and see that none is left."""
    for name in sorted(objects.jobs):
        api.delete_job(namespace, name)
    return not set(api.objects(namespace).jobs) & set(objects.jobs)
