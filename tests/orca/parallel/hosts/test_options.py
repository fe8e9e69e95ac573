"""Options of a model on several machines: what does not go together is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_orca.cli.hosts import HostOptions, host_options, refuse_hosts
from mlsys_orca.parallel.hosts.member import carriers_of
from mlsys_orca.parallel.hosts.settings import HostsSettings, parse_address
from mlsys_orca.parallel.placement import Placement


def options(secret: Path | None, nodes: int | None = 2, listen: str | None = "10.0.0.1:7000", **changes: Any) -> Any:
    return host_options(
        nodes,
        listen,
        secret,
        **({"control_only": False, "threads": 0, "heartbeat_timeout": 5.0, "join_timeout": 300.0} | changes),
    )


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text("0123456789abcdef")
    return path


def test_options_of_one_machine_are_none(secret: Path) -> None:
    assert options(None, None, None) is None
    for wrong in ({"listen": "h:1"}, {"secret": secret}, {"control_only": True}):
        with pytest.raises(InvalidInputError, match="is for a model on several machines: say how many, --nodes N"):
            options(**({"secret": None, "nodes": None, "listen": None} | wrong))


def test_options_of_several_machines_are_all_needed(secret: Path) -> None:
    found = options(secret, 4)
    assert isinstance(found, HostOptions)
    assert (found.address, found.secret, found.share) == (("10.0.0.1", 7000), b"0123456789abcdef", 0.25)
    assert options(secret, 4, control_only=True).share == 0
    with pytest.raises(InvalidInputError, match="--nodes 2 needs --listen too"):
        options(secret, 2, None)
    with pytest.raises(InvalidInputError, match="--nodes 2 needs --secret-file too"):
        options(None)
    secret.chmod(0o644)
    with pytest.raises(InvalidInputError, match="chmod 600"):
        options(secret)


def test_what_several_machines_do_not_have_is_refused() -> None:
    refuse_hosts(None, {"--adapter": ["a=b"]})
    refuse_hosts(2, {"--adapter": None})
    with pytest.raises(InvalidInputError, match=r"several machines \(--nodes\) runs without --adapter"):
        refuse_hosts(2, {"--adapter": ["a=b"]})


@pytest.mark.parametrize("text", ["", "7000", "host", "host:", ":7000", "host:x", "host:70000", "host:-1"])
def test_an_address_is_a_host_and_a_port(text: str) -> None:
    assert parse_address("[::1]:80", "--join") == ("::1", 80)
    with pytest.raises(InvalidInputError, match="is not written HOST:PORT"):
        parse_address(text, "--join")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_an_address_that_nobody_reaches_is_refused(host: str) -> None:
    with pytest.raises(InvalidInputError, match="names no address that other machines can reach"):
        HostsSettings(num_nodes=2, host=host, port=1, secret=b"", model=Path("m"), dtype="fp32", weights=None)


def test_the_first_rank_of_each_node_carries_for_its_stage() -> None:
    place = Placement(stage=1, num_stages=2, rank=2, num_ranks=3)
    assert carriers_of(place, (0, 0, 0, 5, 6, 6)) == {0: 0, 1: 1, 2: 1}
