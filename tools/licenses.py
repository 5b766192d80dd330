#!/usr/bin/env python3
"""Prints the license texts of every library that a program links, as the libraries' own files have them.

    tools/licenses.py NAME      NAME: a program of ours

The libraries are those of tools/sbom.py. A text that several libraries have to the letter is printed once. A library without a text
is an error, since its license cannot be complied with.
"""

import glob, html, json, os, re, sys

sys.dont_write_bytecode = True
import sbom

# the names that crates give to files with licenses and notices
LICENSE = re.compile(r"(LICEN[SC]E|COPYING|COPYRIGHT|NOTICE|UNLICENSE)", re.IGNORECASE)


def read(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def sources():
    """Returns the folder of each crate by its name and version."""
    metadata = json.loads(sbom.output("cargo", "metadata", "--locked", "--filter-platform", sbom.TARGET, "--format-version", "1"))
    return {(p["name"], p["version"]): (os.path.dirname(p["manifest_path"]), p["source"]) for p in metadata["packages"]}


def of_folder(folder):
    names = sorted(name for name in os.listdir(folder) if LICENSE.match(name))
    paths = [os.path.join(folder, name) for name in names]
    # some crates have a folder LICENSES
    files = [file for path in paths for file in (sorted(glob.glob(f"{path}/*")) if os.path.isdir(path) else [path])]
    return [read(file) for file in files] or of_comment(f"{folder}/src/lib.rs")


def of_comment(path):
    """Returns the license in the comment at the top of a source file, where some crates have their only copy."""
    comment = re.match(r"\s*/\*(.*?)\*/", read(path) if os.path.exists(path) else "", re.DOTALL)
    if not comment or "Permission is hereby granted" not in comment[1]:
        return []
    return ["\n".join(re.sub(r"^ ?\*? ?", "", line) for line in comment[1].strip("\n ").splitlines())]


def of_compiler():
    """Returns the texts of Rust's standard library, which lists the crates that it contains."""
    folder = os.path.join(sbom.output("rustc", "--print", "sysroot").strip(), "share/doc/rust")
    page = re.sub(r"(?s)<style.*?</style>|<[^>]*>", "", read(f"{folder}/COPYRIGHT-library.html"))
    page = re.sub(r"\n\s*\n+", "\n\n", html.unescape(page))
    return [page, *(read(f"{folder}/licenses/{name}.txt") for name in ("Apache-2.0", "MIT"))]


def texts(component, folders):
    name, version = component["name"], component["version"]
    if name == "rust-std":
        return of_compiler()
    if name == "musl":
        # the license of musl, from the package musl-tools, with which the programs are linked
        return [read("/usr/share/doc/musl/copyright")]
    folder, source = folders[name, version]
    # our own crates have the program's license
    return of_folder(folder) if source else None


def main():
    [program] = sys.argv[1:]
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    folders, users, missing = sources(), {}, []
    for component in sbom.linked(program):
        found = texts(component, folders)
        if found == []:
            missing.append(component["bom-ref"])
        for text in found or []:
            text = "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")
            users.setdefault(text, []).append(f"{component['name']} {component['version']}")
    if missing:
        sys.exit(f"error: no license text in the sources of {', '.join(missing)}")
    print(f"The program {program} links these libraries statically. Each text is that of the libraries named above it.")
    for text, libraries in sorted(users.items(), key=lambda it: it[1]):
        print(f"\n{'=' * 80}\n{', '.join(libraries)}\n{'-' * 80}\n{text}")


main()
