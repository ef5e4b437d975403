"""The fabric's addresses, as a worker is given them."""

import pytest
from kvferry_engine.worker_settings import WorkerSettings
from kvferry_node.errors import SettingsError
from kvferry_node.options import load_settings


def load(**flags: str) -> WorkerSettings:
    return load_settings(WorkerSettings, "decoder", {"model": "/m", **flags}, {}, None)


@pytest.mark.parametrize(
    ("given", "hosts"),
    [("", ("10.1.1.1",)), ("10.0.0.1", ("10.0.0.1",)), ("10.0.0.1,10.0.1.1", ("10.0.0.1", "10.0.1.1"))],
)
def test_every_address_of_the_fabric_is_a_domain(given, hosts) -> None:
    assert load(fabric_host=given, host="10.1.1.1").fabric_hosts == hosts


@pytest.mark.parametrize("given", [",", "10.0.0.1,", "10.0.0.1, 10.0.1.1", ",".join(f"10.0.{n}.1" for n in range(9))])
def test_a_list_that_is_none_is_refused(given) -> None:
    with pytest.raises(SettingsError, match="1 to 8 addresses with commas"):
        load(fabric_host=given)


def test_one_nic_is_not_two_domains() -> None:
    with pytest.raises(SettingsError, match="another NIC's"):
        load(fabric_host="10.0.0.1,10.0.0.1")
