#!/usr/bin/env python3
"""Prints the certificates in a compressed kernel of x86-64, as PEM: those whose signatures on modules it believes.

    tools/kernel-certificates.py VMLINUZ
"""

import base64, re, struct, subprocess, sys

# a certificate of X.509, version 3: two nested sequences with lengths of two bytes, then [0] { 2 }
CERTIFICATE = re.compile(rb"\x30\x82(..)\x30\x82..\xa0\x03\x02\x01\x02", re.DOTALL)


def unpacked(bzimage):
    """Returns the kernel in a bzImage: Documentation/arch/x86/boot.rst of Linux."""
    sectors = bzimage[0x1F1]
    offset, length = struct.unpack_from("<II", bzimage, 0x248)
    start = (sectors + 1) * 512 + offset
    # the last four bytes are the size of the compressed data
    return subprocess.run(["zstd", "-dcq"], input=bzimage[start:start + length - 4], stdout=subprocess.PIPE, check=True).stdout


def main():
    with open(sys.argv[1], "rb") as file:
        kernel = unpacked(file.read())
    for match in CERTIFICATE.finditer(kernel):
        der = kernel[match.start():match.start() + 4 + int.from_bytes(match[1], "big")]
        text = base64.encodebytes(der).decode().replace("\n", "")
        lines = [text[at:at + 64] for at in range(0, len(text), 64)]
        print("-----BEGIN CERTIFICATE-----", *lines, "-----END CERTIFICATE-----", sep="\n")


if __name__ == "__main__":
    main()
