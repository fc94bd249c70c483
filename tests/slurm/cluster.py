"""A Slurm cluster of two hosts on one machine: real daemons, networks and host names of their own.

    this machine    munged, slurmctld                     10.99.<x>.254
    n1, n2          slurmd in a network namespace each    10.99.<x>.1, .2, joined by a bridge

Each host has its own network, host name and /etc/hosts, so rendezvous, name look-up and gloo go
over a network as they do between machines; files are shared, as on NFS. A node claims eight GPUs
(device files that are none), so that the shipped batch script runs with its own lines. Nothing is
written outside of one folder but the namespaces and the bridge, and `stop` removes those.
"""

import contextlib
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.distributed.launch import TIMEOUT_S

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "ip", "nsenter", "unshare")
NODES = ("n1", "n2")
GPUS = 8
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"})

SLURM_CONF = """
ClusterName=snip
SlurmctldHost={host}({subnet}.254)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits for as long as its former credential holds.
AuthInfo=socket={folder}/munge/socket,cred_expire=10
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
EnforcePartLimits=ALL
KillWait=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
SlurmdPort=16818
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n1 NodeAddr={subnet}.1 CPUs=4 RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN
NodeName=n2 NodeAddr={subnet}.2 CPUs=4 RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=batch Nodes=n1,n2 Default=YES MaxTime=1-00:00:00 State=UP
"""

AS_HOST = """
hostname "$1"
mount --bind "$2" /etc/hosts
shift 2
exec "$@"
"""
"""Inside namespaces of its own: take a host's name and its view of the others."""


class ClusterError(Exception):
    """This machine cannot hold a cluster; the text says why."""


def missing() -> str | None:
    """Return why there can be no cluster here, or None."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces and Slurm's daemons"
    absent = [name for name in COMMANDS if shutil.which(name, path=_path()) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


class Cluster:
    """The cluster; `start` it once, `stop` it always."""

    def __init__(self, folder: Path) -> None:
        """`folder` is new and this cluster's alone."""
        self.folder = folder
        self._subnet = f"10.99.{os.getpid() % 250 + 1}"
        self._tag = f"snip{os.getpid() % 100000}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._environment = {
            **os.environ,
            "PATH": _path(),
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    # ---- jobs ---------------------------------------------------------------------------------

    def submit(self, words: list[str], environment: Mapping[str, str], cwd: Path) -> int:
        """Run `sbatch WORDS` in `cwd`, where its log goes; return the job's number."""
        return int(self._run("sbatch", "--parsable", *words, environment=environment, cwd=cwd))

    def job(self, number: int) -> dict[str, str]:
        """Return what `scontrol show job` tells, e.g. JobState and ExitCode."""
        text = self.scontrol("show", "job", str(number))
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait(self, number: int, timeout_s: float) -> dict[str, str]:
        """Wait until a job has ended; cancel one that takes longer, and fail."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = self.job(number)
            if found["JobState"] in ENDED:
                return found
            time.sleep(0.5)
        with contextlib.suppress(subprocess.SubprocessError):
            self.scontrol("requeuehold", str(number))
        log = Path(found["StdOut"]).read_text(errors="replace")
        raise AssertionError(f"job {number} is still {found['JobState']}:\n{log[-6000:]}")

    def warn_of_time_limit(self, number: int, output: Path) -> None:
        """Bring a running job's time limit within the script's five minutes; wait for the warning.

        What is queued again keeps the job's limit, so that is raised again afterwards.
        """
        begun = time.strptime(self.job(number)["StartTime"], "%Y-%m-%dT%H:%M:%S")
        minutes = math.ceil((time.time() - time.mktime(begun)) / 60) + 4
        self.scontrol("update", f"JobId={number}", f"TimeLimit={minutes}")
        until(lambda: "the time limit is near" in output.read_text(), "Slurm's warning")
        self.scontrol("update", f"JobId={number}", "TimeLimit=60")

    def scontrol(self, *words: str) -> str:
        return self._run("scontrol", *words)

    # ---- starting and stopping ----------------------------------------------------------------

    def start(self) -> None:
        """Bring everything up, or raise ClusterError or RuntimeError: then call `stop`, too."""
        for name in ("munge", "state", "log", "gpus", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        self._write_settings()
        self._make_networks()
        self._start_munge()
        self._start("slurmctld", ["slurmctld", "-D", "-i"])
        for number, node in enumerate(NODES, start=1):
            self._start(f"slurmd-{node}", [*self._as_host(number), "slurmd", "-D"])
        self._until("two idle nodes", self._nodes_are_idle)

    def stop(self) -> None:
        """End the daemons, newest first, and remove the networks."""
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for number in (1, 2):
            self._ip("netns", "del", f"{self._tag}-{number}", check=False)
        self._ip("link", "del", f"br{self._tag}", check=False)

    def _write_settings(self) -> None:
        host = socket.gethostname().split(".")[0]
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        values = {"host": host, "subnet": self._subnet, "port": port, "gpus": GPUS}
        conf = SLURM_CONF.format(folder=self.folder, **values)
        (self.folder / "slurm.conf").write_text(conf)
        devices = self.folder / "gpus"
        for index in range(GPUS):
            os.mknod(devices / f"nvidia{index}", 0o20666, os.makedev(1, 3))  # /dev/null's numbers
        (self.folder / "gres.conf").write_text(
            f"NodeName=n[1-2] Name=gpu File={devices}/nvidia[0-{GPUS - 1}]\n"
        )
        names = [("127.0.0.1", "localhost"), (f"{self._subnet}.254", host)]
        names += [(f"{self._subnet}.{i}", node) for i, node in enumerate(NODES, start=1)]
        hosts = "".join(f"{address} {name}\n" for address, name in names)
        (self.folder / "hosts").write_text(hosts)

    def _make_networks(self) -> None:
        bridge = f"br{self._tag}"
        self._ip("link", "add", bridge, "type", "bridge")
        self._ip("addr", "add", f"{self._subnet}.254/24", "dev", bridge)
        self._ip("link", "set", bridge, "up")
        for number in (1, 2):
            space, outside = f"{self._tag}-{number}", f"v{number}{self._tag}"
            self._ip("netns", "add", space)
            self._ip(
                *["link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space]
            )
            self._ip("link", "set", outside, "master", bridge, "up")
            self._ip("-n", space, "link", "set", "lo", "up")
            self._ip("-n", space, "addr", "add", f"{self._subnet}.{number}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "eth0", "up")

    def _start_munge(self) -> None:
        munge = self.folder / "munge"
        munge.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        words = ["munged", "--foreground", "--force", f"--key-file={key}"]
        words += [f"--socket={munge}/socket", f"--pid-file={self.folder}/munged.pid"]
        words += [f"--log-file={self.folder}/log/munged.log", f"--seed-file={self.folder}/seed"]
        self._start("munged", words)
        self._until("munge's socket", (munge / "socket").exists)

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / "log" / f"{name}.out").open("wb") as out:
            streams = {"stdout": out, "stderr": subprocess.STDOUT}
            self._processes.append(subprocess.Popen(command, env=self._environment, **streams))

    def _as_host(self, number: int) -> list[str]:
        """Words that run a command as host n<number>."""
        # Not `ip netns exec`, which hides the cgroup mounts that slurmd looks for.
        space = f"--net=/run/netns/{self._tag}-{number}"
        own = ["nsenter", space, "unshare", "--uts", "--mount", "bash", "-c", AS_HOST, "_"]
        return [*own, f"n{number}", str(self.folder / "hosts")]

    def _nodes_are_idle(self) -> bool:
        idle = self._run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False)
        return sorted(idle.split()) == list(NODES)

    def _run(
        self,
        *words: str,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        check: bool = True,
    ) -> str:
        done = subprocess.run(
            words,
            env={**self._environment, **(environment or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def _until(self, what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if done():
                return
            ended = [p.args for p in self._processes if p.poll() is not None]
            if ended:
                break
            time.sleep(0.1)
        logs = "".join(
            f"\n---- {file.name}\n{file.read_text(errors='replace')[-1500:]}"
            for file in sorted((self.folder / "log").iterdir())
        )
        raise RuntimeError(f"waited for {what} in vain{logs}")

    def _ip(self, *words: str, check: bool = True) -> None:
        done = subprocess.run(
            ["ip", *words], env=self._environment, capture_output=True, text=True, check=False
        )
        if check and done.returncode != 0:
            raise ClusterError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; fail if it does not come true in `TIMEOUT_S`."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what} in vain"
        time.sleep(0.2)


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
