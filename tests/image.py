"""Builds a Dockerfile without a Docker engine, and runs the image: stages are folders, entered by chroot.

Each step mounts its stage in a namespace of its own, so that no mount outlives it. python:slim is made of
Debian's packages by debootstrap. Needs root, debootstrap, and unshare of util-linux.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

TORCH_FOR_CPUS = "https://download.pytorch.org/whl/cpu/torch/"
POSTGRESQL = "https://apt.postgresql.org/pub/repos/apt/dists/bookworm-pgdg/InRelease"
APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child")


class ImageError(Exception):
    """A Dockerfile that cannot be built, with the line and what the step printed last."""


@dataclass(frozen=True)
class Step:
    line: int
    name: str
    text: str

    def error(self, problem: str) -> ImageError:
        return ImageError(f"line {self.line}, {self.name} {self.text[:70]}: {problem}")

    def array(self) -> list[str]:
        try:
            words: list[str] = json.loads(self.text)
        except ValueError:
            raise self.error('write it as a JSON array, ["a", "b"]') from None
        return words


def steps(text: str) -> list[Step]:
    """Returns the instructions of a Dockerfile.

    Raises:
        ImageError: one cannot be carried out.
    """
    found = []
    lines = iter([each for each in enumerate(text.splitlines(), 1) if not each[1].lstrip().startswith("#")])
    for number, line in lines:
        while line.endswith("\\"):
            line = line[:-1] + next(lines)[1]
        name, _, rest = line.strip().partition(" ")
        if not name:
            continue
        step = Step(number, name.upper(), rest.strip())
        if step.name not in KNOWN:
            raise step.error(f"the runner does not know {step.name}")
        if option := re.match(r"--(?!from=)\S+|<<", step.text):
            raise step.error(f"the runner does not know {option[0]}")
        found.append(step)
    return found


@dataclass
class Stage:
    """What an image is: files and how it is run.

    Args:
        layers: folders, the topmost first; that one is written to, and has `root` and `work` next to it.
    """

    layers: tuple[Path, ...]
    arguments: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "root"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.layers[0].with_name("root")

    def copy(self, folder: Path) -> Stage:
        """The same with an empty layer on top."""
        for name in ("top", "work", "root"):
            (folder / name).mkdir(parents=True)
        return replace(
            self,
            layers=(folder / "top", *self.layers),
            arguments=dict(self.arguments),
            environment=dict(self.environment),
        )

    def mounted(self) -> str:
        """The shell's line that mounts the files."""
        top, *others = self.layers
        options = f"lowerdir={':'.join(map(str, others))},upperdir={top},workdir={top.with_name('work')}"
        return f"mount -t overlay overlay -o {options} {self.root}"

    def inside(self, command: Sequence[str], variables: Mapping[str, str], *mounts: str) -> list[str]:
        """The command that runs another as this user, as the first process of its own namespace."""
        script = [
            self.mounted(),
            f"cd {self.root}",
            "mount -t proc proc proc",
            "mount -t sysfs -o ro sysfs sys",
            "mount --rbind /dev dev",
            "mount -t tmpfs tmpfs dev/shm",
            *mounts,
            'home=$(chroot . getent passwd "$0" | cut -d: -f6)',
            'exec chroot --userspec="$0" . env -i -C "$1" HOME="$home" "${@:2}"',
        ]
        set_to = [f"{name}={value}" for name, value in variables.items()]
        return [*APART, "bash", "-ec", "\n".join(script), self.user, self.folder, *set_to, *command]

    def size_bytes(self) -> int:
        """Length of the files, as `docker images` shows it, without what is mounted to run them."""
        script = f"{self.mounted()} && du -sx --apparent-size --block-size=1 {self.root}"
        done = subprocess.run([*APART, "sh", "-ec", script], capture_output=True, text=True, check=True)
        return int(done.stdout.split()[0])

    def run(self, *arguments: str, entrypoint: list[str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs the image's entry point, or another one, to its end."""
        first = self.entrypoint if entrypoint is None else entrypoint
        command = self.inside([*first, *arguments], self.environment)
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=300
        )

    def start(self, *arguments: str, log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Starts the image; the first process in it is the only child of the one that is returned."""
        command = [*self.entrypoint, *(arguments or self.command)]
        with log.open("wb") as output:
            return subprocess.Popen(
                self.inside(command, self.environment | variables),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip


class Machine:
    """How this machine reaches packages: settings of pip, apt and proxies, and what they name on its disk.

    Steps see those files below /mnt, which is empty in Debian: nothing of them stays in the image.
    """

    def __init__(self, folder: Path) -> None:
        self.paths = set[Path]()
        proxies = ("http_proxy", "https_proxy", "no_proxy")
        self.variables = {name: value for name, value in os.environ.items() if name.lower() in proxies}
        listed = _output(sys.executable, "-m", "pip", "config", "list")
        for line in sorted(listed, key=lambda line: line.startswith(":env:")):  # Variables count most.
            key, _, value = line.partition("=")
            name = key.rpartition(".")[2].upper().replace("-", "_")
            self.variables[f"PIP_{name}"] = self._seen(ast.literal_eval(value))
        self.variables.pop("PIP_CONFIG_FILE", None)
        reaching = [line for line in _output("apt-config", "dump") if re.match(r"Acquire::https?::", line)]
        settings = folder / "apt.conf"
        settings.write_text("".join(f"{self._seen(line)}\n" for line in reaching), encoding="utf-8")
        self.variables["APT_CONFIG"] = self._seen(str(settings))

    def _seen(self, setting: str) -> str:
        """A setting with its paths as steps see them."""

        def below(match: re.Match[str]) -> str:
            path = Path(match[0])
            if not path.exists():
                return match[0]
            # Pages of a local index name files in a folder beside it.
            self.paths.add(path.parent if setting[: match.start()].endswith("file://") else path)
            return f"/mnt{path}"

        return re.sub(r"(?:(?<=file://)|(?<![\w/:.-]))/[^\s\"']+", below, setting)

    def mounts(self) -> Iterator[str]:
        yield "mount -t tmpfs tmpfs mnt"
        for path in sorted(self.paths):
            make = "mkdir -p" if path.is_dir() else "install -D /dev/null"
            yield f"{make} mnt{path} && mount --bind -o ro {path} mnt{path}"


def _output(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def reaches(url: str) -> bool:
    try:
        return httpx.head(url, timeout=20.0, follow_redirects=True).is_success
    except httpx.HTTPError:
        return False


class Build:
    """Carries out a Dockerfile, in folders that stay until someone removes them.

    Args:
        dockerfile: `<its name>.dockerignore` is next to it.
        context: what COPY reads.
        folder: empty.
        given: values of ARG.
    """

    def __init__(self, dockerfile: Path, context: Path, folder: Path, given: Mapping[str, str]) -> None:
        self.context, self.folder, self.given = context, folder, given
        self.steps = steps(dockerfile.read_text(encoding="utf-8"))
        patterns = Path(f"{dockerfile}.dockerignore").read_text(encoding="utf-8").split()
        self.ignored = re.compile("|".join(map(_as_expression, patterns)))
        self.machine = Machine(folder)
        self.outside = dict[str, str]()
        self.stages = dict[str, Stage]()
        self.stage = Stage(())

    def image(self) -> Stage:
        """Returns the last stage."""
        for step in self.steps:
            began_s = time.monotonic()
            KNOWN[step.name](self, step)
            print(f"{time.monotonic() - began_s:6.1f} s  {step.name} {step.text[:90]}", flush=True)
        return self.stage

    def _from(self, step: Step) -> None:
        image, *name = re.split(r" +as +", _expanded(step.text, self.outside), flags=re.IGNORECASE)
        python = re.fullmatch(r"python:([\d.]+)-slim-(\w+)", image)
        if python and image not in self.stages:
            self.stages[image] = self._slim(step, *python.groups())
        if image not in self.stages:
            raise step.error(f"{image} is neither python:<version>-slim-<Debian's release> nor a stage")
        self.stage = self.stages[image].copy(self.folder / f"stage-{step.line}")
        self.stages.update(dict.fromkeys(name, self.stage))

    def _slim(self, step: Step, version: str, release: str) -> Stage:
        """Debian with the packages of python:slim, and Python and pip in /usr/local, without setuptools."""
        folder = self.folder / "debian"
        for path, text in SLIM.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text.format(release=release), encoding="utf-8")
            (folder / path).chmod(0o755 if text.startswith("#!") else 0o644)
        packages = "ca-certificates,netbase,tzdata,python3-venv,libpython3-dev"
        options = ("--variant=minbase", f"--include={packages}")
        self._carry_out(step, ["debootstrap", *options, release, str(folder)])
        (folder / "etc/apt/sources.list").unlink()
        base = Stage((folder,), environment={"PATH": PATH, "LANG": "C.UTF-8"}).copy(self.folder / "slim")
        self._run_in(base, step, SLIM_PYTHON)
        found = base.run("python", "--version", entrypoint=[]).stdout.split()[-1]
        if not f"{found}.".startswith(f"{version}."):
            raise step.error(f"{release} has Python {found}, not {version}; give PYTHON another value")
        if not reaches(POSTGRESQL):
            print("no apt.postgresql.org here: Debian's postgresql-client stands for postgresql-client-18")
            self._run_in(base, step, STAND_IN)
        return base

    def _arg(self, step: Step) -> None:
        name, _, default = step.text.partition("=")
        in_stage = bool(self.stage.layers)
        known = self.outside if not in_stage else self.stage.arguments
        known[name] = self.given.get(name, _expanded(default, self._variables() if in_stage else known))

    def _env(self, step: Step) -> None:
        for word in shlex.split(step.text):
            name, _, value = word.partition("=")
            self.stage.environment[name] = _expanded(value, self._variables())

    def _variables(self) -> dict[str, str]:
        return self.stage.arguments | self.stage.environment

    def _workdir(self, step: Step) -> None:
        self.stage.folder = str(Path(self.stage.folder) / _expanded(step.text, self._variables()))
        self._run_in(replace(self.stage, folder="/"), step, f"mkdir -p {shlex.quote(self.stage.folder)}")

    def _user(self, step: Step) -> None:
        self.stage.user = _expanded(step.text, self._variables())

    def _entrypoint(self, step: Step) -> None:
        self.stage.entrypoint, self.stage.command = step.array(), []

    def _cmd(self, step: Step) -> None:
        self.stage.command = step.array()

    def _nothing(self, step: Step) -> None:
        """It says how the image is run: the container's own layer holds its volumes."""

    def _run(self, step: Step) -> None:
        self._run_in(self.stage, step, step.text)

    def _run_in(self, stage: Stage, step: Step, text: str) -> None:
        variables = stage.arguments | stage.environment | self.machine.variables
        self._carry_out(step, stage.inside(["sh", "-c", text], variables, *self.machine.mounts()))

    def _carry_out(self, step: Step, command: list[str]) -> None:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", check=False,
        )  # fmt: skip
        if done.returncode:
            raise step.error(f"exit status {done.returncode}\n{done.stdout[-4000:]}")

    def _copy(self, step: Step) -> None:
        source, *words = _expanded(step.text, self._variables()).split()
        if not source.startswith("--from="):
            words, source = [source, *words], ""
        *paths, target = words
        into = target.endswith("/") or len(paths) > 1
        destination = self.stage.root / str(Path(self.stage.folder) / target).removeprefix("/")
        if source:
            other = self.stages[source.removeprefix("--from=")].copy(self.folder / f"copied-{step.line}")
            script, found = [other.mounted()], [other.root / path.removeprefix("/") for path in paths]
        else:
            script, found = [], [self._of_context(step, path) for path in paths]
        script += [self.stage.mounted(), f"mkdir -p {destination if into else destination.parent}"]
        copy = "cp -r --preserve=mode,timestamps"
        for path in found:
            # A folder's content is copied, not the folder.
            script.append(f"if [ -d {path} ]; then mkdir -p {destination}; {copy} {path}/. {destination}; "
                          f"else {copy} {path} {destination}; fi")  # fmt: skip
        self._carry_out(step, [*APART, "bash", "-ec", "\n".join(script)])

    def _of_context(self, step: Step, name: str) -> Path:
        """A copy of a file or folder of the context, without what the engine is not given."""
        path, copied = self.context / name, self.folder / f"context-{step.line}" / name

        def left_out(folder: str, names: list[str]) -> list[str]:
            below = Path(folder).relative_to(self.context)
            return [each for each in names if self.ignored.fullmatch(str(below / each))]

        if not path.exists() or left_out(str(path.parent), [path.name]):
            raise step.error(f"{name} is not in the context")
        copied.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, copied, ignore=left_out, symlinks=True)
        else:
            shutil.copy2(path, copied)
        return copied


KNOWN: dict[str, Callable[[Build, Step], None]] = {
    "ARG": Build._arg,
    "CMD": Build._cmd,
    "COPY": Build._copy,
    "ENTRYPOINT": Build._entrypoint,
    "ENV": Build._env,
    "EXPOSE": Build._nothing,
    "FROM": Build._from,
    "RUN": Build._run,
    "USER": Build._user,
    "VOLUME": Build._nothing,
    "WORKDIR": Build._workdir,
}


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda match: variables.get(match[1] or match[2], ""), text)


def _as_expression(pattern: str) -> str:
    parts = {"**/": "(?:.*/)?", "*": "[^/]*"}
    return re.sub(r"\*\*/|\*|[^*]+", lambda match: parts.get(match[0], re.escape(match[0])), pattern)


PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
SLIM = {
    "etc/hosts": "127.0.0.1 localhost\n",
    "etc/apt/apt.conf.d/docker-clean": """
DPkg::Post-Invoke {{ "rm -f /var/cache/apt/archives/*.deb"; }};
Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache "";
""",
    "etc/apt/sources.list.d/debian.list": """
deb http://deb.debian.org/debian {release} main
deb http://deb.debian.org/debian {release}-updates main
deb http://deb.debian.org/debian-security {release}-security main
""",
    "etc/dpkg/dpkg.cfg.d/slim": """
force-unsafe-io
path-exclude /usr/share/doc/*
path-exclude /usr/share/info/*
path-exclude /usr/share/locale/*
path-exclude /usr/share/man/*
path-include /usr/share/doc/*/copyright
""",
    "usr/sbin/policy-rc.d": "#!/bin/sh\nexit 101\n",
}
"""What Debian's slim image has besides packages, as far as it counts here: no documentation, no services."""
SLIM_PYTHON = """
set -e
rm -rf /var/cache/apt/archives/*.deb /var/lib/apt/lists/* /usr/share/locale/* /usr/share/man/*
rm /usr/lib/python3*/config-*/*.a
python3 -m venv /usr/local
pip install --no-cache-dir --upgrade pip
pip uninstall --yes setuptools
"""
STAND_IN = """
set -e
script=/usr/share/postgresql-common/pgdg/apt.postgresql.org.sh
dpkg-divert --local --no-rename --divert $script.package --add $script
mkdir -p ${script%/*}
cat > $script <<'END'
#!/bin/sh
set -e
made=$(mktemp -d)
mkdir $made/DEBIAN
cat > $made/DEBIAN/control <<CONTROL
Package: postgresql-client-18
Version: 18
Architecture: all
Maintainer: none <none@example.com>
Depends: postgresql-client
Description: stands for the package of apt.postgresql.org
CONTROL
dpkg-deb --build $made $made.deb
apt-get install -y --no-install-recommends $made.deb
rm -r $made $made.deb
END
chmod +x $script
"""
