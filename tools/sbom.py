#!/usr/bin/env python3
"""Prints the bill of materials of a program, in CycloneDX 1.5 (JSON): every library that it links.

    tools/sbom.py NAME FILE      NAME: a program of ours; FILE: the built program, whose hash is put in

Crates: as Cargo resolves them for this program, its target and its features, with the hashes of Cargo.lock. Beside them Rust's standard
library with the musl in it.
"""

import hashlib, json, os, re, subprocess, sys, tomllib, uuid

TARGET = "x86_64-unknown-linux-musl"
PACKAGES = {"firstlight": "firstlight-cli", "join-service": "firstlight-services", "key-service": "firstlight-services",
            "member-controller": "firstlight-services",
            "unlock": "firstlight-unlock", "bootstrapper": "firstlight-bootstrapper", "firstlight-volume": "firstlight-volume"}


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def sha256(digest):
    return [{"alg": "SHA-256", "content": digest}]


def crates(program):
    """Yields a component for each crate that the program links, itself excluded."""
    package = PACKAGES[program]
    with open("Cargo.lock", "rb") as file:
        lock = tomllib.load(file)["package"]
    hashes = {(p["name"], p["version"]): p.get("checksum") for p in lock}
    lines = output("cargo", "tree", "--locked", "--package", package, "--target", TARGET, "--edges", "normal,no-proc-macro",
                   "--prefix", "none", "--no-dedupe", "--format", "{p}|{l}|{f}").splitlines()
    for line in sorted(set(lines)):
        name_and_version, license, features = line.split("|")
        name, version = name_and_version.split()[:2]
        version = version.removeprefix("v")
        if name == package:
            continue
        component = {"type": "library", "bom-ref": f"{name}@{version}", "name": name, "version": version,
                     "licenses": [{"expression": license.replace("/", " OR ")}]}
        digest = hashes[name, version]
        if digest:
            component |= {"purl": f"pkg:cargo/{name}@{version}", "hashes": sha256(digest)}
        if features:
            component["properties"] = [{"name": "cargo:features", "value": features}]
        yield component


def standard_library():
    """Yields Rust's standard library, and the C library that comes with it."""
    rust = re.search(r"^release: (.*)$", output("rustc", "-vV"), re.M)[1]
    yield {"type": "library", "bom-ref": f"rust-std@{rust}", "name": "rust-std", "version": rust,
           "licenses": [{"expression": "MIT OR Apache-2.0"}], "purl": f"pkg:generic/rust-std@{rust}"}
    folder = output("rustc", "--print", "target-libdir", "--target", TARGET).strip()
    with open(os.path.join(folder, "self-contained/libc.a"), "rb") as file:
        # the version that musl's own program prints is the only text of this form
        musl = re.search(rb"\0(1\.\d+\.\d+)\0", file.read())[1].decode()
    yield {"type": "library", "bom-ref": f"musl@{musl}", "name": "musl", "version": musl,
           "licenses": [{"expression": "MIT"}], "purl": f"pkg:generic/musl@{musl}"}


def linked(program):
    """Returns a component for each library that the program links."""
    return [*crates(program), *standard_library()]


def application(name, digest):
    """Returns the component of a program of ours with this SHA-256."""
    with open("Cargo.toml", "rb") as file:
        version = tomllib.load(file)["workspace"]["package"]["version"]
    return {"type": "application", "bom-ref": f"{name}@{version}", "name": name, "version": version,
            "licenses": [{"expression": "Apache-2.0 OR MIT"}], "hashes": sha256(digest)}


def write(what, components):
    """Prints the bill of materials of a program or an image."""
    digest = what["hashes"][0]["content"]
    dependencies = [{"ref": what["bom-ref"], "dependsOn": sorted(component["bom-ref"] for component in components)}]
    print(json.dumps({
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        # equal programs get equal files
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, digest)}",
        "metadata": {"component": what}, "components": components, "dependencies": dependencies,
    }, indent=1))


def main():
    name, path = sys.argv[1:]
    path = os.path.abspath(path)
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    write(application(name, digest), linked(name))


if __name__ == "__main__":
    main()
