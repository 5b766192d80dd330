#!/usr/bin/env python3
"""Prints the packages of Debian that an image of mkosi has, and those that its kernel was built from, one a line as sha256sum does:
hash and name of the archive.

    tools/image-packages.py SBOM [LOCK]      SBOM: the image's bill of materials, by tools/image-sbom.py

With LOCK, a list that this program has printed, it prints nothing, and fails if the image has other packages than the list.
"""

import json, sys
from urllib.parse import parse_qs, unquote


def packages(path):
    """Returns the hash of each package's archive by its name."""
    with open(path) as file:
        components = json.load(file)["components"]
    found = {}
    for component in components:
        kind, _, query = component.get("purl", "").partition("?")
        if kind.startswith("pkg:deb/"):
            version = unquote(kind.rpartition("@")[2]).replace(":", "%3a")
            archive = f"{component['name']}_{version}_{parse_qs(query)['arch'][0]}.deb"
            found[archive] = component["hashes"][0]["content"]
        for item in component.get("properties", []):
            if item["name"] == "firstlight:built-from":
                digest, archive = item["value"].split()
                found[archive] = digest
    return found


def main():
    path, *lock = sys.argv[1:]
    image = packages(path)
    if not lock:
        print("".join(f"{digest}  {archive}\n" for archive, digest in sorted(image.items())), end="")
        return
    with open(lock[0]) as file:
        listed = {archive: digest for digest, archive in map(str.split, file)}
    differing = [f"{archive}: SHA-256 {image[archive]}, expected {listed[archive]}"
                 for archive in sorted(image.keys() & listed.keys()) if image[archive] != listed[archive]]
    differing += [f"{archive}: it is in the image, and not in the list" for archive in sorted(image.keys() - listed.keys())]
    differing += [f"{archive}: it is in the list, and not in the image" for archive in sorted(listed.keys() - image.keys())]
    if differing:
        sys.exit("\n".join([f"error: the image has other packages than {lock[0]}:", *differing]))


if __name__ == "__main__":
    main()
