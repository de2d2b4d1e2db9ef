"""The peer's side of the protocol: JSON lines on standard input and output.

One process per peer. Every request has one reply. Whatever the libraries print goes to standard
error, which the host logs: only the protocol's own lines reach standard output.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from typing import Any, Mapping, Protocol, TextIO

from .problem import Case, Unsupported

PROTOCOL = 1
#: The most elements that one `verify` may return.
MAX_VERIFIED = 1 << 16
#: As many rows may be asked for however long they are: one of each matrix of a training step.
MIN_VERIFIED_ROWS = 5


class Unavailable(Exception):
    """This machine lacks what the peer needs."""


@dataclass(frozen=True)
class Profile:
    """A way of computing: its name in the experiment and the peer's options."""

    id: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def option(self, name: str, default: Any) -> Any:
        return self.options.get(name, default)


class Job(Protocol):
    """A prepared case: data in place, kernels compiled, ready to be timed."""

    #: How it is computed, for people; where results are rounded first.
    notes: list[str]

    def verify(self, rows: list[int]) -> bytes:
        """Those rows of a result computed by the timed calls, little-endian."""

    def sample(self, turns: int, budget_us: float) -> list[float]:
        """Microseconds per call."""


class Peer(Protocol):
    name: str
    #: Options that the peer reads: another one in a profile is an error there, not a default here.
    options: frozenset[str]
    #: A peer that computes with quantised weights says so: `quantized = True`. One whose library holds
    #: memory for later has `released()`, which is called after a job is gone.

    def versions(self) -> dict[str, str]: ...

    def device(self, wanted: str) -> str:
        """The name of `cpu`, `cuda` or `cuda:N`. Raises Unavailable where it cannot work there."""

    def prepare(self, case: Case, profile: Profile, seed: int, rotations: int | str) -> Job: ...


class Server:
    """Answers requests for one peer."""

    def __init__(self, peer: Peer, default_device: str) -> None:
        self._peer = peer
        self._default_device = default_device
        self._jobs: dict[int, tuple[Case, Job]] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """The reply; None ends the conversation."""
        match request.get("type"):
            case "hello":
                return self._hello(request)
            case "prepare":
                return self._prepare(request)
            case "verify":
                return self._verify(request)
            case "sample":
                return self._sample(request)
            case "release":
                self._jobs.pop(int(request["id"]), None)
                getattr(self._peer, "released", lambda: None)()
                return {"type": "released", "id": request["id"]}
            case "clocks":
                return {"type": "clocks", **clocks(self._default_device)}
            case "quit":
                return None
            case other:
                return {"type": "failed", "id": request.get("id"), "reason": f"unknown request {other!r}"}

    def _hello(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request.get("protocol") != PROTOCOL:
            reason = f"protocol {request.get('protocol')!r}; this peer speaks {PROTOCOL}"
            return {"type": "unavailable", "reason": reason}
        self._default_device = str(request.get("device") or self._default_device)
        versions = {"python": sys.version.split()[0], **self._peer.versions()}
        return {"type": "hello", "protocol": PROTOCOL, "name": self._peer.name,
                "versions": versions, "device": self._peer.device(self._default_device)}

    def _prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        profile = Profile(**{k: v for k, v in request["profile"].items() if k in ("id", "options")})
        unknown = sorted(set(profile.options) - self._peer.options - {"device"})
        if unknown:
            known = ", ".join(sorted(self._peer.options))
            raise ValueError(f"option {', '.join(unknown)} of profile {profile.id}; "
                             f"{self._peer.name} knows {known}")
        device = str(profile.option("device", self._default_device))
        case = Case.parse(request["case"], device, getattr(self._peer, "quantized", False))
        job = self._peer.prepare(case, profile, int(request["seed"]), request.get("rotations", "auto"))
        self._jobs[int(request["id"])] = (case, job)
        return {"type": "prepared", "id": request["id"], "bytes": case.bytes(), "flops": case.flops(),
                "notes": job.notes}

    def _job(self, request: Mapping[str, Any]) -> tuple[Case, Job]:
        try:
            return self._jobs[int(request["id"])]
        except KeyError:
            raise ValueError(f"no case is prepared as id {request.get('id')}") from None

    def _verify(self, request: Mapping[str, Any]) -> dict[str, Any]:
        case, job = self._job(request)
        rows = [int(r) for r in request["rows"]]
        m, n = case.out_shape
        if any(not 0 <= r < m for r in rows) or len(rows) * n > max(MAX_VERIFIED, MIN_VERIFIED_ROWS * n):
            raise ValueError(f"rows {rows[:4]}… of [{m}, {n}]: at most {MAX_VERIFIED} elements of it")
        data = base64.b64encode(job.verify(rows)).decode("ascii")
        return {"type": "verified", "id": request["id"], "shape": [m, n], "dtype": case.dtype,
                "rows": rows, "data": data}

    def _sample(self, request: Mapping[str, Any]) -> dict[str, Any]:
        _, job = self._job(request)
        us = job.sample(int(request.get("turns", 1)), float(request.get("budget_us", 20_000)))
        return {"type": "samples", "id": request["id"], "us": us}


def clocks(device: str) -> dict[str, float]:
    """The GPU's state by nvidia-smi; empty where there is none."""
    if not device.startswith("cuda"):
        return {}
    fields = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "power_w": "power.draw",
              "temperature_c": "temperature.gpu"}
    index = device.partition(":")[2] or "0"
    # CUDA numbers what it is shown, nvidia-smi all there is.
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if int(index) < len(visible):
        index = visible[int(index)]
    command = ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(fields.values())}",
               "--format=csv,noheader,nounits"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        return {name: float(value) for name, value in zip(fields, shown.split(","), strict=True)}
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}


def guarded(server: Server, line: str) -> dict[str, Any] | None:
    """A reply whatever happens: an exception becomes `unsupported` or `failed`."""
    request: Mapping[str, Any] = {}
    try:
        request = json.loads(line)
        return server.answer(request)
    except (Unavailable, Unsupported) as why:
        # What is missing as a whole is told to `hello`; what one case lacks, to `prepare`.
        kind = {"hello": "unavailable", "prepare": "unsupported"}.get(str(request.get("type")), "failed")
        at = {} if kind == "unavailable" else {"id": request.get("id")}
        return {"type": kind, **at, "reason": str(why)}
    except Exception as error:  # noqa: BLE001 - the run goes on without this profile
        traceback.print_exc(file=sys.stderr)
        reason = f"{type(error).__name__}: {error}".strip()
        if isinstance(request, Mapping) and request.get("type") == "hello":
            # A peer that cannot say what it is, for want of a package, is not there.
            return {"type": "unavailable", "reason": reason[:2000]}
        at = request.get("id") if isinstance(request, Mapping) else None
        return {"type": "failed", "id": at, "reason": reason[:2000]}


def private_stdout() -> TextIO:
    """The protocol's own stream; descriptor 1 becomes standard error, for C libraries too."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    os.dup2(2, 1)
    return own


def serve(peer: Peer, default_device: str) -> int:
    """Answers until `quit` or the end of the input. The exit code."""
    replies, server = private_stdout(), Server(peer, default_device)
    for line in sys.stdin:
        if not line.strip():
            continue
        reply = guarded(server, line)
        if reply is None:
            return 0
        try:
            print(json.dumps(reply, allow_nan=True), file=replies, flush=True)
        except BrokenPipeError:
            return 0
        if reply["type"] == "unavailable":
            return 0
    return 0


class _Absent:
    """A peer that cannot run here: it says so when it is greeted."""

    options: frozenset[str] = frozenset()

    def __init__(self, name: str, reason: str) -> None:
        self.name, self._reason = name, reason

    def versions(self) -> dict[str, str]:
        raise Unavailable(self._reason)

    def device(self, wanted: str) -> str:
        raise Unavailable(self._reason)

    def prepare(self, case: Case, profile: Profile, seed: int, rotations: int | str) -> Job:
        raise Unavailable(self._reason)


def main(name: str, make: Any, default_device: str | None = None) -> int:
    """Makes a peer and serves it. What it lacks is told to the host, not to a terminal. `make` gives
    the peer and the device that it runs on where the host names none."""
    try:
        peer, device = make()
    except (ImportError, Unavailable) as why:
        return serve(_Absent(name, str(why)), default_device or "cpu")
    return serve(peer, default_device or device)
