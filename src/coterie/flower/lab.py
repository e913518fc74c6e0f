"""A Flower federation on this machine: a SuperLink with a database, some SuperNodes, TLS, and a key for every node.

`python -m coterie.flower.lab FOLDER` is the supervisor: it starts the processes of a folder that `prepare` has made,
starts again those that end, and ends them all on request. It stops only what it started.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.flower.credentials import make_certificates, make_node_key
from coterie.storage.lock import Held, alone
from coterie.storage.snapshot import write_text

LINK = "superlink"
WORKER = "-worker"  # after the name of its node
NAME = "coterie"  # of the SuperLink in Flower's configuration
PEERS = "peers"  # the file with the identities of all nodes
PAUSE = 5.0  # seconds before a process that has ended is started again: a node is refused while it is thought online
GRACE = 10.0  # seconds that a process is given to end by itself
PATIENCE = 120.0  # seconds that nodes have to come online, and Flower's own command to answer
SURROUNDINGS = {  # no telemetry, no installs, no waiting
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; Flower's own 1.0 is waited for in every message
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Lab:
    """A local federation, which is all in one folder: credentials, Flower's home, the database, logs and state.

    Args:
        folder: Where it is.
    """

    folder: Path

    @property
    def settings(self) -> dict[str, Any]:
        """What `prepare` chose: the ports, and the names of the nodes."""
        path = self.folder / "lab.json"
        if not path.exists():
            raise ValueError(f"{self.folder} holds no local federation; `coterie flower up` makes one")
        return json.loads(path.read_text(encoding="utf-8"))

    @property
    def address(self) -> str:
        """Where nodes reach the SuperLink."""
        return f"127.0.0.1:{self.settings['entrance'] or self.settings['ports'][LINK]}"

    @property
    def environment(self) -> dict[str, str]:
        """Of every process of Flower's."""
        tools = str(Path(sys.executable).parent)
        path = os.pathsep.join([tools, os.environ.get("PATH", "")])
        return {**os.environ, **SURROUNDINGS, "FLWR_HOME": str(self.folder / "home"), "PATH": path}

    def prepare(self, nodes: int, *, workers: bool = True, entrance: int = 0) -> None:
        """Make credentials and choose ports, once: a federation that is there already stays as it is.

        Args:
            nodes: How many.
            workers: Whether each node has a resident worker.
            entrance: The port of a proxy through which nodes reach the SuperLink; 0 where there is none.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds keys, tokens and what nodes remember
        with alone(self.folder / "prepare.lock", PATIENCE):
            self._prepare(nodes, workers, entrance)

    def _prepare(self, nodes: int, workers: bool, entrance: int) -> None:
        if (self.folder / "lab.json").exists():
            if (there := len(self.settings["nodes"])) != nodes:
                raise ValueError(f"{self.folder} holds a local federation of {there} nodes, not {nodes}")
            if self.settings["workers"] != workers:
                has = "has" if self.settings["workers"] else "has no"
                raise ValueError(f"the local federation in {self.folder} {has} resident workers; choose another folder")
            return
        names = [f"site{i}" for i in range(nodes)]
        for part in ("home", "logs", "nodes"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        make_certificates(self.folder / "certificates")
        for name in names:
            make_node_key(self.folder / "keys" / name)
        from coterie.flower.memory import Memory
        from coterie.flower.policy import identity_of  # which loads torch; the supervisor does without

        known = [identity_of(Memory(self.folder / "nodes" / name, name)).public.hex() for name in names]
        write_text(self.folder / PEERS, "".join(f"{key}  # {name}\n" for key, name in zip(known, names, strict=True)))
        ports = dict(zip([LINK, *names], free_ports(nodes + 1), strict=True))
        self._tell_flower(ports[LINK])
        chosen = {"nodes": names, "ports": ports, "workers": workers, "entrance": entrance}
        write_text(self.folder / "lab.json", json.dumps(chosen, indent=1) + "\n")

    def commands(self) -> dict[str, list[str]]:
        """The command line of every process, by its name."""
        ports, keys, tls = self.settings["ports"], self.folder / "keys", self._tls()
        loopback = ["--host", "127.0.0.1", "--port"]
        link = [
            "flower-superlink", *loopback, str(ports[LINK]), *tls, "--enable-supernode-auth",
            "--disable-runtime-dependency-installation", "--database", str(self.folder / "superlink.db"),
        ]  # fmt: skip
        nodes = {
            name: [
                "flower-supernode", *loopback, str(ports[name]), *tls, "--superlink", self.address,
                "--root-certificates", str(self.folder / "certificates" / "ca.crt"),
                "--auth-supernode-private-key", str(keys / name), "--node-config", self._node_config(i, name),
            ]
            for i, name in enumerate(self.settings["nodes"])
        }  # fmt: skip
        return {LINK: link} | self._workers() | nodes

    def _workers(self) -> dict[str, list[str]]:
        if not self.settings["workers"]:
            return {}
        command = [sys.executable, "-m", "coterie.flower.worker"]
        return {f"{name}{WORKER}": [*command, str(self.folder / "nodes" / name)] for name in self.settings["nodes"]}

    def _node_config(self, i: int, name: str) -> str:
        own = self.folder / "nodes" / name
        config = {"site": name, "partition-id": i, "num-partitions": len(self.settings["nodes"]), "memory": str(own)}
        if (peers := self.folder / PEERS).exists():  # older ones have none
            config |= {"peers": str(peers), "server-picks": True}
        if self.settings["workers"]:
            config["worker"] = str(own)
        return " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())

    def register(self) -> dict[str, str]:
        """Make the nodes' keys known to the SuperLink, those that are not yet; every node's number by its name."""
        path = self.folder / "registered.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for name in self.settings["nodes"]:
            if name not in known:
                key = self.folder / "keys" / f"{name}.pub"
                answer = self.flwr("supernode", "register", str(key), NAME, "--name", name)
                if not answer["success"]:
                    raise ValueError(f"the SuperLink refused the key of {name}: {answer['error-message']}")
                known[name] = str(answer["node-id"])
                write_text(path, json.dumps(known) + "\n")
        return known

    def online(self) -> list[str]:
        """The names of the nodes that the SuperLink believes to be online."""
        path = self.folder / "registered.json"
        if not path.exists():
            return []
        known = json.loads(path.read_text(encoding="utf-8"))
        answer = self.flwr("supernode", "list", NAME)
        if not answer["success"]:
            return []
        online = {n["node-id"] for n in answer["nodes"] if n["status"] == "online"}
        return [name for name, number in known.items() if number in online]

    def flwr(self, *args: str) -> dict[str, Any]:
        """Ask Flower's own command, which answers in JSON."""
        command = ["flwr", *args, "--format", "json"]
        try:
            asked = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            return {"success": False, "error-message": f"`flwr {args[0]}` has not answered within {PATIENCE:.0f} s"}
        try:
            return json.loads(asked.stdout)
        except json.JSONDecodeError:
            return {"success": False, "error-message": (asked.stderr or asked.stdout).strip()}

    def processes(self) -> dict[str, dict[str, Any]]:
        """What the supervisor says of its processes; empty where none is running."""
        path = self.folder / "state.json"
        if not path.exists():
            return {}
        state = json.loads(path.read_text(encoding="utf-8"))
        return state["processes"] if _is_supervisor(state["supervisor"], self.folder) else {}

    def wait(self, tell: Callable[[int], None] = lambda online: None) -> None:
        """Until all nodes are online, telling how many are.

        Raises:
            ValueError: Some are not after a while; says which.
        """
        end, names = time.monotonic() + PATIENCE, self.settings["nodes"]
        while len(online := self.online()) < len(names):
            if time.monotonic() > end:
                missing = ", ".join(n for n in names if n not in online)
                raise ValueError(f"not online after {PATIENCE:.0f} s: {missing}; see {self.folder / 'logs'}")
            tell(len(online))
            time.sleep(2)  # asking is a process of Flower's own, which takes more than one of a core

    def start(self) -> None:
        """Start the supervisor, which outlives this process. Where one is running, the new one ends at once."""
        log = (self.folder / "logs" / "supervisor.log").open("ab")
        with log:
            subprocess.Popen(
                [sys.executable, "-m", "coterie.flower.lab", str(self.folder)],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def stop(self) -> bool:
        """End the supervisor, and with it all that it started; False where none was running."""
        if not self.processes():
            return False
        state = json.loads((self.folder / "state.json").read_text(encoding="utf-8"))
        os.kill(state["supervisor"], signal.SIGTERM)
        end = time.monotonic() + 2 * GRACE
        while _is_supervisor(state["supervisor"], self.folder) and time.monotonic() < end:
            time.sleep(0.1)
        return True

    def _tls(self) -> list[str]:
        at = self.folder / "certificates"
        return [
            "--ssl-ca-certfile", str(at / "ca.crt"), "--ssl-certfile", str(at / "server.pem"),
            "--ssl-keyfile", str(at / "server.key"),
        ]  # fmt: skip

    def _tell_flower(self, port: int) -> None:
        root = self.folder / "certificates" / "ca.crt"
        text = (
            f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "127.0.0.1:{port}"\n'
            f'root-certificates = "{root}"\n'
        )
        write_text(self.folder / "home" / "config.toml", text)


@dataclass
class Service:
    """One process that is kept running."""

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    due: float = 0.0  # when it is to be started, if it is not running

    def keep(self, now: float) -> bool:
        """Start the process if it is due; whether anything changed."""
        if self.process is not None:
            if self.process.poll() is None:
                return False
            self.end(signal.SIGKILL)  # what it has started
            self.process, self.due = None, now + PAUSE
            return True
        if now < self.due:
            return False
        with self.log.open("ab") as log:
            # A session of its own: what a node starts for its messages ends with it.
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.starts += 1
        return True

    def end(self, how: signal.Signals) -> None:
        """Tell the process, and all that it started, to end."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, how)

    def described(self) -> dict[str, Any]:
        """For the state file."""
        return {"pid": self.process.pid if self.process else None, "starts": self.starts}


def supervise(lab: Lab) -> None:
    """Keep a lab's processes running until SIGTERM; nothing where another does so."""
    with suppress(Held), alone(lab.folder / "supervisor.lock", 0):
        _supervise(lab)


def _supervise(lab: Lab) -> None:
    services = {
        name: Service(name, command, lab.folder / "logs" / f"{name}.log", lab.environment)
        for name, command in lab.commands().items()
    }
    stopping: list[int] = []
    nodes: set[str] = set()  # that may start: one whose key is unknown is refused, and ends
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    try:
        while not stopping:
            if not nodes and listens(lab.settings["ports"][LINK]):
                nodes = _registered(lab)
            own = [s for name, s in services.items() if name == LINK or name.endswith(WORKER) or name in nodes]
            if any([service.keep(time.monotonic()) for service in own]):  # of all: any() alone would stop at the first
                described = {name: service.described() for name, service in services.items()}
                state = {"supervisor": os.getpid(), "processes": described}
                write_text(lab.folder / "state.json", json.dumps(state) + "\n")
            time.sleep(0.2)
    finally:
        _end(list(services.values()))
        (lab.folder / "state.json").unlink(missing_ok=True)


def _registered(lab: Lab) -> set[str]:
    try:
        return set(lab.register())
    except ValueError as error:  # it is tried again
        sys.stderr.write(f"{error}\n")
        return set()


def _end(services: list[Service]) -> None:
    for service in services:
        service.end(signal.SIGTERM)
    end = time.monotonic() + GRACE
    for service in services:
        if service.process is not None:
            with suppress(subprocess.TimeoutExpired):
                service.process.wait(max(0.0, end - time.monotonic()))
        service.end(signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody uses now."""
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def listens(port: int) -> bool:
    """Whether somebody takes connections at a port of loopback."""
    with socket.socket() as s:
        s.settimeout(0.5)
        return s.connect_ex(("127.0.0.1", port)) == 0


def _is_supervisor(pid: int, folder: Path) -> bool:
    """Whether a process is the supervisor of this folder, and not another that has got its number since."""
    asked = subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True)
    return asked.stdout.rstrip().endswith(f"coterie.flower.lab {folder}")


if __name__ == "__main__":
    supervise(Lab(Path(sys.argv[1])))
