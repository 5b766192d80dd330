#!/usr/bin/env python3
"""Which package costs how many bytes of a program: the sizes of its symbols, by the crate (or C library) that they are from.

Usage: tools/sizes.py PROGRAM [LINES]      PROGRAM is not stripped: target/release-build/TARGET/release/NAME
       tools/sizes.py --parts PROGRAM..    the table of SPECIFICATION.md, in KB
       tools/sizes.py --ours PROGRAM       the bytes of our own code
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent

# C code, by the prefixes of its names
C = [
    (r"ring_core|_?ring|x25519|ecp_nistz|p256|p384|aes_|aesni|bn_|bssl|sha256_block|sha512_block|ChaCha|poly1305|gcm_|vpaes|fiat|LIMBS?", "ring (C)"),
]


def crate(name: str) -> str:
    """`<a::B as c::D>::e` is a's."""
    found = re.match(r"[<&\[(\s*]*(?:dyn |mut |const )*([A-Za-z_]\w*)(?:\[[0-9a-f]+\])?::", name)
    if found:
        return found.group(1)
    for pattern, library in C:
        if re.match(pattern, name):
            return library
    return "C library and others"


def of_crates(program: str) -> collections.Counter[str]:
    """The bytes of each crate."""
    symbols = subprocess.run(
        ["nm", "--demangle=rust", "--print-size", program], check=True, capture_output=True, text=True
    ).stdout
    sizes: collections.Counter[str] = collections.Counter()
    for line in symbols.splitlines():
        fields = line.split(maxsplit=3)
        if len(fields) == 4 and fields[2] in "tTrRdDwW":
            sizes[crate(fields[3])] += int(fields[1], 16)
    return sizes


MESSAGES = {"proto", "prost", "bytes"}
OURS = {path.name for path in (ROOT / "src").iterdir()} - MESSAGES | {"unlock", "bootstrapper", "join_service", "key_service", "firstlight"}
PARTS = [
    ("ours", OURS),
    ("messages: prost", MESSAGES),
    ("TLS: rustls, webpki, ML-KEM", {"rustls", "webpki", "rustls_pki_types", "ml_kem", "module_lattice", "sha3", "keccak", "hybrid_array", "kem"}),
    ("cryptography: ring", {"ring", "ring (C)"}),
    ("HTTP: ureq", {"ureq", "ureq_proto", "http", "httparse", "utf8_zero", "percent_encoding"}),
    ("JSON: serde", {"serde", "serde_core", "serde_json", "itoa", "zmij"}),
    ("standard library", {"core", "alloc", "std", "hashbrown", "gimli", "addr2line", "rustc_demangle", "memchr", "C library and others"}),
]
TABLES = (".eh_frame", ".eh_frame_hdr", ".gcc_except_table")


def parts(program: str) -> dict[str, int]:
    """The bytes of each part of a program as it is shipped. Texts have no symbols."""
    sizes = of_crates(program)
    found = {name: sum(sizes.pop(crate, 0) for crate in crates) for name, crates in PARTS}
    found["other packages"] = sum(sizes.values())
    sections = subprocess.run(["size", "-A", program], check=True, capture_output=True, text=True).stdout
    lengths = {fields[0]: int(fields[1]) for fields in map(str.split, sections.splitlines()) if len(fields) == 3 and fields[1].isdigit()}
    found["tables for unwinding"] = sum(lengths.get(name, 0) for name in TABLES)
    with tempfile.NamedTemporaryFile() as shipped:
        subprocess.run(["strip", "-o", shipped.name, program], check=True)
        found["texts, tables, padding"] = pathlib.Path(shipped.name).stat().st_size - sum(found.values())
    return found


def main() -> None:
    if sys.argv[1] == "--ours":
        sizes = of_crates(sys.argv[2])
        print(sum(sizes[crate] for crate in OURS))
        return
    if sys.argv[1] == "--parts":
        found = {pathlib.Path(program).name: parts(program) for program in sys.argv[2:]}
        print("| part |" + "".join(f" `{name}` |" for name in found))
        print("|---|" + "---:|" * len(found))
        for part in next(iter(found.values())):
            print(f"| {part} |" + "".join(f" {one[part] / 1000:.0f} |" for one in found.values()))
        return
    lines = int(sys.argv[2]) if len(sys.argv) > 2 else 25
    for name, size in of_crates(sys.argv[1]).most_common(lines):
        print(f"{size:9}  {name}")


if __name__ == "__main__":
    main()
