"""`make release`: all that a release publishes, in dist/, of a clean checkout of a tag. docs/releasing.md has the rest.

The same commit gives the same bytes at any time, but for images, whose Debian packages move on.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS, CHART = ROOT / "deploy" / "locks", ROOT / "deploy" / "helm" / "kvferry"
DIST = ROOT / "dist"
IMAGES = {"cpu": ["--target=cpu"], "cuda12": ["--build-arg=CUDA=12"], "cuda13": ["--build-arg=CUDA=13"]}
TOOLS = ("podman", "buildah", "docker")


def main() -> int:
    """0 made, 1 one of the tools failed, 2 there is nothing to make a release of."""
    os.chdir(ROOT)
    try:
        make()
    except ValueError as error:
        print(f"make release: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"make release: this ended with {error.returncode}: {shlex.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    return 0


def make() -> None:
    version = tagged()
    notes = notes_of(version)
    os.environ["SOURCE_DATE_EPOCH"] = output("git", "log", "-1", "--format=%ct")
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    packages()
    (DIST / f"kvferry-chart-{semantic(version)}.tgz").write_bytes(chart(version))
    contents(version)
    (DIST / "notes.md").write_text(notes)
    left_out = images(version)
    sums = [f"{hashlib.file_digest(path.open('rb'), 'sha256').hexdigest()}  {path.name}\n" for path in made()]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    for path in made():
        print(f"{path.stat().st_size:>13,}  {path.relative_to(ROOT)}")
    if left_out:
        print(f"no images: {left_out}")


def tagged() -> str:
    """The version of the tag that is checked out. Raises ValueError where there is none, or something was changed."""
    if changed := output("git", "status", "--porcelain"):
        raise ValueError(f"the checkout is not clean -> commit, or remove:\n{changed}")
    described = subprocess.run(["git", "describe", "--exact-match", "--tags", "--match=v*"], capture_output=True)
    if described.returncode:
        raise ValueError("this commit has no tag -> git tag --annotate v0.1.0, or check one out")
    return output(sys.executable, "-m", "hatchling", "version")


def notes_of(version: str) -> str:
    """What CHANGELOG.md says of it. Raises ValueError where it says nothing, or has more to say."""
    sections = re.split(r"^## \[(.+?)\].*\n", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    notes = dict(zip(sections[1::2], sections[2::2], strict=True))
    if re.search(r"^- ", notes.get("Unreleased", ""), re.MULTILINE):
        raise ValueError(f"CHANGELOG.md has entries under [Unreleased] -> move them to [{version}]")
    if version not in notes:
        raise ValueError(f"CHANGELOG.md has no section [{version}]")
    return notes[version].strip() + "\n"


def packages() -> None:
    """Source archive and wheel; the wheel is made of the archive, as anybody can make it."""
    build = (sys.executable, "-m", "hatchling", "build", f"--directory={DIST}")
    run(*build, "--target=sdist")
    (archive,) = DIST.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        (sources,) = Path(folder).iterdir()
        run(*build, "--target=wheel", cwd=sources)


def chart(version: str) -> bytes:
    """As `helm package` makes it, with the commit's time for every file, and the images of this release."""
    epoch = int(os.environ["SOURCE_DATE_EPOCH"])
    packed = io.BytesIO()
    with gzip.GzipFile("", "wb", fileobj=packed, mtime=epoch) as zipped, tarfile.open("", "w", zipped) as archive:
        for path in sorted(CHART.rglob("*")):
            if path.is_file():
                data = path.read_bytes()
                if path.name == "Chart.yaml":
                    data = re.sub(rb"(?m)^(version|appVersion): .*$", rb"\1: " + semantic(version).encode(), data)
                if path.name == "values.yaml":
                    data = re.sub(rb"\bkvferry:(cpu|cuda)", rb"kvferry:" + version.encode() + rb"-\1", data)
                member = tarfile.TarInfo(f"kvferry/{path.relative_to(CHART)}")
                member.size, member.mtime = len(data), epoch
                archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def semantic(version: str) -> str:
    """PEP 440's 0.2.0rc1 is 0.2.0-rc.1 to Helm."""
    return re.sub(r"(\d)(a|b|rc)(\d+)$", r"\1-\2.\3", version)


def contents(version: str) -> None:
    """A bill of materials for each lock: what an image has of Python packages."""
    for name in IMAGES:
        written = output(
            sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements", LOCKS / f"{name}.txt",
            "--output-reproducible", "--pyproject=pyproject.toml", "--mc-type=application",
        )  # fmt: skip
        bill = json.loads(written)
        bill["metadata"]["component"]["version"] = version  # pyproject.toml has none
        (DIST / f"kvferry-{version}-{name}.cdx.json").write_text(json.dumps(bill, indent=1) + "\n")


def images(version: str) -> str:
    """A tar of each image of IMAGES, all by default, built with the flags of BUILD. Returns why there are none."""
    wanted = os.environ.get("IMAGES", " ".join(IMAGES)).split()
    tools = [os.environ["ENGINE_TOOL"]] if "ENGINE_TOOL" in os.environ else TOOLS
    tool = next((each for each in tools if works(each)), None)
    if not wanted or tool is None:
        return f"neither of {', '.join(tools)} works here" if wanted else "IMAGES names none"
    own = shlex.split(os.environ.get("BUILD", ""))
    dated = [] if tool == "docker" else ["--format=docker", f"--timestamp={os.environ['SOURCE_DATE_EPOCH']}"]
    for name in wanted:
        tag, target = f"kvferry:{version}-{name}", DIST / f"kvferry-{version}-{name}.image.tar"
        run(tool, "build", *dated, *own, *IMAGES[name], f"--build-arg=VERSION={version}", f"--tag={tag}", ".")
        if Path(tool).name == "buildah":
            run(tool, "push", f"localhost/{tag}", f"docker-archive:{target}:{tag}")
        else:
            run(tool, "save", f"--output={target}", tag)
    return ""


def works(tool: str) -> bool:
    return shutil.which(tool) is not None and subprocess.run([tool, "info"], capture_output=True).returncode == 0


def made() -> list[Path]:
    return sorted(DIST.iterdir())


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    subprocess.run(command, cwd=cwd, check=True, stdout=sys.stderr)


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
