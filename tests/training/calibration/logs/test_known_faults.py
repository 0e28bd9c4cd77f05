import pytest

from env.errors import InputError
from training.calibration.logs.known_faults import FILE, known_faults, load_known_faults


def test_every_entry_has_a_reason():
    faults = known_faults()
    entries = [*faults.groups.values(), *faults.scans_left_out, *faults.scan_vms]
    reasons = [entry.reason for entry in (*entries, *faults.interference_left_out)]
    reasons += [*faults.unlogged_moves.values(), *faults.quiet_after_jobs.values()]
    assert all(reasons)


def test_a_group_without_an_entry_has_no_fault():
    fault = known_faults().of_group("someone/else")
    assert fault.reason == "" and fault.moves_logged and fault.service_cores is None


def test_a_scan_runs_on_the_first_vm_unless_its_path_says_otherwise():
    faults = known_faults()
    assert faults.scan_vm("florianhitz/cca-group-090", "logs/4-1-a/x.txt").endswith(" a")
    assert faults.scan_vm("florianhitz/cca-group-090", "logs/4-1-d/x.txt").endswith(" d")
    assert faults.scan_vm("someone/else", "logs/4-1-d/x.txt") == "someone/else a"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("yields: true", "yield: true"), "groups.florianhitz/cca-group-090.yield: unknown field"),
        (("vm: slow", "vm: [slow]"), "scan_vms.1.vm: "),
        (("    reason: shows one thread's curve\n", ""), "scans_left_out.3.reason: is required"),
        (("groups:", "groups: ["), "not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, change, message):
    path = tmp_path / "faults.yaml"
    text = FILE.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(InputError) as refused:
        load_known_faults(path)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.yaml: cannot be read"):
        load_known_faults(tmp_path / "nowhere.yaml")
