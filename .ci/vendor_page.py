"""Fetch the page's two JavaScript libraries from npm, or check the copies in the tree.

`vendor_page.py` fetches the versions that `qengine/server/page/vendor/vendor.json` names with npm's own client, checks
each package against the integrity written there, and writes the files. `vendor_page.py --check` needs no network: it
compares the files in the tree with their SHA-256. To take a newer version, change version and integrity (`npm view
NAME@VERSION dist.integrity`) in vendor.json and run it with `--update`, which writes the new SHA-256 too.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).resolve().parent.parent / "qengine" / "server" / "page" / "vendor"
LIST = VENDOR / "vendor.json"


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def fetch(package: dict[str, Any], folder: Path) -> tarfile.TarFile:
    """The package as npm packs it, open; ends the program if it is not what the list names."""
    name = f"{package['name']}@{package['version']}"
    done = subprocess.run(["npm", "pack", "--silent", name], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"vendor_page: npm pack {name} failed: {done.stderr.strip()}")
    archive = folder / done.stdout.strip().splitlines()[-1]
    got = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if got != package["integrity"]:
        sys.exit(f"vendor_page: {name} is {got}, the list has {package['integrity']}; nothing was written")
    return tarfile.open(archive)


def write(package: dict[str, Any], update: bool) -> None:
    """Write a package's files; each must have the SHA-256 of the list, which `update` replaces."""
    with tempfile.TemporaryDirectory() as folder, fetch(package, Path(folder)) as archive:
        for file in package["files"]:
            member = archive.extractfile(f"package/{file['from']}")
            assert member is not None, f"{file['from']} is not a file"
            content = member.read()
            if update:
                file["sha256"] = digest(content)
            elif digest(content) != file["sha256"]:
                sys.exit(f"vendor_page: {file['name']} of {package['name']} is not the file the list names")
            (VENDOR / file["name"]).write_bytes(content)


def check(packages: list[dict[str, Any]]) -> None:
    """Compare the tree with the list; ends the program at the first difference."""
    listed = {file["name"]: file["sha256"] for package in packages for file in package["files"]}
    present = {path.name for path in VENDOR.iterdir()} - {LIST.name}
    if present != set(listed):
        sys.exit(f"vendor_page: {VENDOR} has {sorted(present)}, the list {sorted(listed)}; run vendor_page.py")
    for name, sha256 in listed.items():
        if digest((VENDOR / name).read_bytes()) != sha256:
            sys.exit(f"vendor_page: {name} differs from the list; run vendor_page.py to fetch it again")


def main() -> None:
    """Fetch, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the tree with the list, fetch nothing")
    parser.add_argument("--update", action="store_true", help="write the fetched files' SHA-256 to the list")
    options = parser.parse_args()
    packages = json.loads(LIST.read_text(encoding="utf-8"))
    if not options.check:
        for package in packages:
            write(package, options.update)
        if options.update:
            LIST.write_text(json.dumps(packages, indent=2) + "\n", encoding="utf-8")
    check(packages)
    print(f"vendor_page: {', '.join(p['name'] + ' ' + p['version'] for p in packages)}")


if __name__ == "__main__":
    main()
