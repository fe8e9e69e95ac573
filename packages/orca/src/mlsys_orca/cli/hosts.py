"""Options of a model on several machines, and ``mlsys orca worker``, which each of the others runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from mlsys_core.errors import InvalidInputError
from mlsys_orca.cli.options import Model
from mlsys_orca.loading.named import DEFAULT_MODEL

if TYPE_CHECKING:
    from mlsys_orca.parallel.group import ParallelModel
    from mlsys_orca.parallel.hosts.settings import NodePlacer
    from mlsys_serving.http.tls import TlsConfig

Nodes = Annotated[
    int | None,
    typer.Option(min=1, help="Machines that hold parts, this one among them; the others run 'mlsys orca worker'."),
]
Listen = Annotated[str | None, typer.Option(help="HOST:PORT of this machine at which the other nodes join.")]
SecretFile = Annotated[
    Path | None, typer.Option(help="A file with the secret that all machines of this run share, readable by you alone.")
]
ControlOnly = Annotated[
    bool, typer.Option("--control-only", help="This machine holds no part: all --nodes are others.")
]
HeartbeatTimeout = Annotated[float, typer.Option(min=0.5, help="Seconds of silence after which a node is lost.")]
JoinTimeout = Annotated[float, typer.Option(min=1, help="Seconds for all nodes to join and load, at the start.")]

Executor = Annotated[
    str,
    typer.Option(help="Who places the parts: 'local', on this machine or --nodes; 'ray', over a Ray cluster's nodes."),
]
RayAddress = Annotated[
    str, typer.Option(help="HOST:PORT of the Ray cluster's head; 'auto': of the cluster that this machine is in.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Options of a server whose model lies on several machines."""

    num_nodes: int
    address: tuple[str, int]
    secret: bytes
    tls: TlsConfig | None
    holds_parts: bool
    num_threads: int  # as given
    heartbeat_timeout_s: float
    join_timeout_s: float
    placer: NodePlacer | None = None  # starts the nodes

    @property
    def share(self) -> float:
        """Part of the model that this machine is to hold, about."""
        return 1 / self.num_nodes if self.holds_parts else 0.0

    @staticmethod
    def dtype_of(given: str | None) -> str:
        """Return the dtype for all machines, this one's where none is given."""
        from mlsys_orca.loading.load import default_dtype

        return given or default_dtype()

    def divided(self, parts: ParallelModel, model: str, *, dtype: str, **form: Any) -> ParallelModel:
        """Return the parts of a model, to lie on these machines.

        Args:
            parts: On one machine.
            model: As the command names it.
            dtype: Of all machines (:meth:`dtype_of`), as the parts have it.
            form: ``weights`` and ``activations``, as given.
        """
        from mlsys_core.config import settings
        from mlsys_core.models import resolve_model
        from mlsys_orca.parallel.hosts.settings import HostsSettings

        hosts = HostsSettings(
            num_nodes=self.num_nodes,
            host=self.address[0],
            port=self.address[1],
            secret=self.secret,
            model=resolve_model(model, settings().cache_dir),
            dtype=dtype,
            **form,
            tls=self.tls,
            holds_parts=self.holds_parts,
            num_threads=self.num_threads,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            join_timeout_s=self.join_timeout_s,
            placer=self.placer,
        )
        return replace(parts, hosts=hosts)


def host_options(
    nodes: int | None,
    listen: str | None,
    secret_file: Path | None,
    *,
    control_only: bool,
    threads: int,
    heartbeat_timeout: float,
    join_timeout: float,
    tls: TlsConfig | None = None,
) -> HostOptions | None:
    """Return the options of a model on several machines; None: it is on this one.

    Raises:
        InvalidInputError: one of the options is missing, or cannot be read.
    """
    given = {"--listen": listen, "--secret-file": secret_file}
    if nodes is None:
        if found := [name for name, value in {**given, "--control-only": control_only or None}.items() if value]:
            raise InvalidInputError(f"{found[0]} is for a model on several machines: say how many, --nodes N")
        return None
    if missing := [name for name, value in given.items() if value is None]:
        raise InvalidInputError(f"--nodes {nodes} needs {missing[0]} too: nodes join there, with a secret of this run")
    from mlsys_orca.parallel.hosts.secrets import read_secret
    from mlsys_orca.parallel.hosts.settings import parse_address

    assert listen is not None
    assert secret_file is not None
    return HostOptions(
        num_nodes=nodes,
        address=parse_address(listen, "--listen"),
        secret=read_secret(secret_file),
        tls=tls,
        holds_parts=not control_only,
        num_threads=threads,
        heartbeat_timeout_s=heartbeat_timeout,
        join_timeout_s=join_timeout,
    )


def placed_options(
    executor: str,
    model: str,
    *,
    address: str,
    listen: str | None,
    tensor_parallel: int,
    pipeline_parallel: int,
    replicas: int,
    threads: int,
    heartbeat_timeout: float,
    join_timeout: float,
    refused: Mapping[str, object],
) -> HostOptions:
    """Return the options of a model whose nodes a registered placement policy starts.

    Args:
        executor: Name of the policy.
        model: As given; each node finds its own copy by it.
        address: Of the cluster.
        listen: Where nodes join; None: this machine's address in the cluster, any free port.
        tensor_parallel: As given.
        pipeline_parallel: As given.
        replicas: As given.
        threads: Of each rank; 0: 1.
        heartbeat_timeout: Seconds.
        join_timeout: Seconds.
        refused: By option, what was given and the policy decides: anything that is not false is refused.

    Raises:
        InvalidInputError: there is no such policy or cluster, the parts do not fit it, or an option is refused.
    """
    from mlsys_core.plugins import installed_plugins
    from mlsys_core.plugins.specs import PolicySpec

    registry = installed_plugins().registry
    placements = {spec.name: spec for spec in registry.all(PolicySpec) if spec.kind == "placement"}
    if executor not in placements:
        hint = ": pip install mlsys-ray" if executor == "ray" else ""
        raise InvalidInputError(f"--executor is {', '.join(['local', *placements])}, not {executor!r}{hint}")
    if given := [name for name, value in refused.items() if value]:
        raise InvalidInputError(f"--executor {executor} decides about {given[0]} itself: leave one of them out")
    from mlsys_orca.parallel.hosts.settings import parse_address

    own = None if listen is None else parse_address(listen, "--listen")
    placer: NodePlacer = registry.part(placements[executor])(
        model,
        address=address,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        num_replicas=replicas,
        num_threads=threads or 1,
        silence_s=heartbeat_timeout,
    )
    return HostOptions(
        num_nodes=placer.num_nodes,
        address=own or (placer.host, 0),
        secret=os.urandom(32).hex().encode(),
        tls=None,  # the authority would have to be on each node
        holds_parts=False,
        num_threads=threads or 1,
        heartbeat_timeout_s=heartbeat_timeout,
        join_timeout_s=join_timeout,
        placer=placer,
    )


def refuse_hosts(nodes: int | None, reasons: Mapping[str, object]) -> None:
    """See that nothing was asked for which a model on several machines has not.

    Args:
        nodes: As given.
        reasons: By option, what was given: anything that is not false is refused.

    Raises:
        InvalidInputError: something was.
    """
    if nodes is not None and (given := [name for name, value in reasons.items() if value]):
        raise InvalidInputError(f"a model on several machines (--nodes) runs without {given[0]}: leave one of them out")


def worker(
    model: Model = DEFAULT_MODEL,
    *,
    join: Annotated[str, typer.Option(help="HOST:PORT of the server's --listen.")],
    secret_file: Annotated[
        Path, typer.Option(help="A file with the secret that all machines of this run share, readable by you alone.")
    ],
    tls_authority: Annotated[
        Path | None, typer.Option(help="The authority of the server's certificate (PEM), if it has --tls-certificate.")
    ] = None,
    threads: Annotated[
        int, typer.Option(min=0, help="Threads of each part's operators; 0: the cores this process may use, divided.")
    ] = 0,
    join_timeout: Annotated[float, typer.Option(min=0, help="Seconds to keep trying while nobody listens.")] = 60.0,
) -> None:
    """Hold parts of a model on this machine, for a server on another one (serve --nodes), until that ends.

    The model is this machine's own copy; what it holds, and in which form, the server says.

    Example: mlsys orca worker smollm2-135m-instruct --join 10.0.0.1:7000 --secret-file run.secret
    """
    from mlsys_orca.parallel.hosts.secrets import read_secret
    from mlsys_orca.parallel.hosts.settings import parse_address
    from mlsys_serving.processes import can_supervise

    if why := can_supervise():
        raise InvalidInputError(f"this machine cannot hold parts of a model: {why}")
    address, secret = parse_address(join, "--join"), read_secret(secret_file)
    from mlsys_orca.parallel.hosts.node import run_node

    raise typer.Exit(
        run_node(
            model,
            join=address,
            secret=secret,
            authority=tls_authority,
            threads=threads,
            timeout_s=join_timeout,
            say=lambda line: typer.echo(f"mlsys: {line}", err=True),
        )
    )
