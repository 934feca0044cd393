"""The trainers' rendezvous port is one that the kernel does not hand out."""

from recipe.partial_rollout.training import worker_group


def test_range_lies_below_the_kernels(tmp_path):
    file = tmp_path / "range"
    file.write_text("32768\t60999\n")
    assert worker_group.ephemeral_start(file) == 32768
    first, end = worker_group.master_port_range()
    assert 10_000 <= first < end <= worker_group.ephemeral_start()


def test_unknown_kernel_range_is_linuxs(tmp_path):
    assert worker_group.ephemeral_start(tmp_path / "none") == 32768


def test_worker_group_gets_a_range_unless_it_has_one():
    class Group:
        def __init__(self, **kwargs):
            self.ports = kwargs["master_port_range"]

    wrapped = worker_group.with_master_ports(Group)
    assert wrapped(master_port_range=[1, 2]).ports == [1, 2]
    first, end = wrapped().ports
    assert 10_000 <= first < end
