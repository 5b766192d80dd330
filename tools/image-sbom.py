#!/usr/bin/env python3
"""Prints the bill of materials of an image of mkosi, in CycloneDX 1.5 (JSON): the packages of Debian, other programs, and what
those of ours link, and the kernel.

    tools/image-sbom.py IMAGE ARCHIVES KERNEL MANIFEST.. -- PROGRAM..

IMAGE: whose hash is put in; ARCHIVES: the folder with the packages that mkosi installed; KERNEL: of tools/mkosi-kernel.sh; MANIFEST:
mkosi's, one for the system and one for the initrd; PROGRAM: a file that no package brought, ours or NAME-vVERSION/bin/FILE.
"""

import hashlib, json, os, re, sys
from urllib.parse import quote

# a checkout stays clean
sys.dont_write_bytecode = True
import sbom

OURS = ("unlock", "bootstrapper")


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def packages(archives, manifests):
    """Yields a component for each package of Debian, with the hash of its archive and the manifests that name it."""
    named = {}
    for path in manifests:
        with open(path) as file:
            content = json.load(file)
        for package in content["packages"]:
            key = (package["name"], package["version"], package["architecture"], content["config"]["release"])
            named.setdefault(key, []).append(os.path.basename(path))
    for (name, version, architecture, release), files in sorted(named.items()):
        archive = os.path.join(archives, f"{name}_{version.replace(':', '%3a')}_{architecture}.deb")
        purl = f"pkg:deb/debian/{name}@{quote(version, safe='~')}?arch={architecture}&distro={release}"
        yield {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl,
               "hashes": sbom.sha256(digest(archive)),
               "properties": [{"name": "firstlight:manifest", "value": file} for file in files]}


def programs(files):
    """Yields a component for each program; those of ours have what they link."""
    for path in files:
        name = os.path.basename(path)
        if name in OURS:
            component = sbom.application(name, digest(path)) | {"components": sbom.linked(name)}
            for library in component["components"]:
                # two programs may link the same library with different features
                library["bom-ref"] = f"{name}/{library['bom-ref']}"
            yield component
        else:
            version = re.search(r"-(v[^/-]+)/", path)[1]
            yield {"type": "application", "bom-ref": f"{name}@{version}", "name": name, "version": version,
                   "hashes": sbom.sha256(digest(path))}


def main():
    split = sys.argv.index("--")
    image, archives, kernel, *manifests = map(os.path.abspath, sys.argv[1:split])
    files = [os.path.abspath(path) for path in sys.argv[split + 1:]]
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    name = os.path.basename(image)
    what = {"type": "operating-system", "bom-ref": name, "name": name, "hashes": sbom.sha256(digest(image))}
    with open(os.path.join(kernel, "component.json")) as file:
        built = json.load(file)
    sbom.write(what, [*packages(archives, manifests), built, *programs(files)])


if __name__ == "__main__":
    main()
