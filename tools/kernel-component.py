#!/usr/bin/env python3
"""Prints the component of the image's kernel for a bill of materials, in CycloneDX 1.5 (JSON): our build of Debian's source.

    tools/kernel-component.py FOLDER PATCH COMPILER PACKAGES

FOLDER: of tools/mkosi-kernel.sh, with vmlinuz and version; PATCH: the change to Debian's source; COMPILER: its name and version;
PACKAGES: a file with the packages of Debian that decided the bytes, as sha256sum prints them.
"""

import hashlib, json, os, sys
from urllib.parse import quote

# a checkout stays clean
sys.dont_write_bytecode = True
import sbom


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main():
    folder, patch, compiler, packages = sys.argv[1:]
    with open(os.path.join(folder, "version")) as file:
        version = file.read().strip()
    with open(packages) as file:
        built_from = [line.split() for line in file]
    source_hash, archive = next(item for item in built_from if item[1].startswith("linux-source-"))
    source = archive.partition("_")[0]
    purl = f"pkg:deb/debian/{source}@{quote(version, safe='~')}?arch=all&distro=trixie"
    properties = [("firstlight:patch", f"{digest(patch)}  {os.path.basename(patch)}"), ("firstlight:compiler", compiler)]
    properties += [("firstlight:built-from", f"{hash}  {archive}") for hash, archive in built_from]
    name = "linux-aml-confined"
    component = {
        "type": "operating-system", "bom-ref": f"{name}@{version}", "name": name, "version": version,
        "hashes": sbom.sha256(digest(os.path.join(folder, "vmlinuz"))),
        "licenses": [{"expression": "GPL-2.0-only WITH Linux-syscall-note"}],
        "pedigree": {
            "ancestors": [{"type": "operating-system", "name": source, "version": version, "purl": purl,
                           "hashes": sbom.sha256(source_hash)}],
            "notes": f"Debian's source with {os.path.basename(patch)}; docs/images/kernel.md",
        },
        "properties": [{"name": key, "value": value} for key, value in properties],
    }
    print(json.dumps(component, indent=1))


if __name__ == "__main__":
    main()
