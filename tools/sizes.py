#!/usr/bin/env python3
"""Which package costs how many bytes of a program: the sizes of its symbols, by the crate (or C library) that they are from.

Usage: tools/sizes.py PROGRAM [LINES]      PROGRAM is not stripped: target/release-build/TARGET/release/NAME
"""

import collections
import re
import subprocess
import sys

# C, by how its names begin
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


def main() -> None:
    program = sys.argv[1]
    lines = int(sys.argv[2]) if len(sys.argv) > 2 else 25
    symbols = subprocess.run(
        ["nm", "--demangle=rust", "--print-size", program], check=True, capture_output=True, text=True
    ).stdout
    sizes: collections.Counter[str] = collections.Counter()
    for line in symbols.splitlines():
        fields = line.split(maxsplit=3)
        if len(fields) == 4 and fields[2] in "tTrRdDwW":
            sizes[crate(fields[3])] += int(fields[1], 16)
    for name, size in sizes.most_common(lines):
        print(f"{size:9}  {name}")


if __name__ == "__main__":
    main()
