#!/usr/bin/env python3
"""Counts habits that spread if nobody counts them, and fails above a limit.

    tools/counts.py FOLDER          the folder with the crates

* Functions that return `Result<_, String>`: their callers, metrics and tests cannot ask what kind of error it is.
* Public types that have the same name, in any crate: the reader of a use has to ask which one it is. Each module may have its own
  `Error`, and each command its own `Options`: their module always stands before them.
* Types with the name of a role or a message of remote attestation (RFC 9334) that another type has too, in any crate. The messages
  on the wire, in the crate proto, have the names of what they carry.

Tests are left out, as tools/long_functions.py does.
"""
import collections
import pathlib
import re
import sys

from long_functions import LITERAL, TESTS

# Lower these as the counts fall.
STRING_ERRORS = 9
SHARED_NAMES = 23
SHARED_WORDS = 0

OF_EACH_MODULE = {"Error", "Options"}
WORDS = {"Attester", "Endorsement", "Endorser", "Evidence", "Refusal", "Verifier"}
# A signature is short; `[^;{]` ends it.
RETURNS_STRING = re.compile(r"\bfn (\w+)[^;{]*?->[^;{]*?\bResult<[^;{]*,\s*String\s*>")
PUBLIC_TYPE = re.compile(r"^ *pub (?:struct|enum|trait|type|union) (\w+)", re.M)


def main():
    strings, names = collections.Counter(), collections.defaultdict(list)
    for path in sorted(pathlib.Path(sys.argv[1]).rglob("*.rs")):
        if {"tests", "tests.rs", "testing.rs", "examples"} & set(path.parts):
            continue
        crate = path.relative_to(sys.argv[1]).parts[0]
        code = TESTS.split(LITERAL.sub(lambda literal: "\n" * literal[0].count("\n"), path.read_text()))[0]
        strings[crate] += len(RETURNS_STRING.findall(code))
        for name in PUBLIC_TYPE.findall(code):
            names[name].append(crate)
    shared, words = collections.Counter(), collections.Counter()
    for name, crates in names.items():
        if name in WORDS and len(set(crates) - {"proto"}) > 1:
            words[name] = len(crates)
        if len(crates) > 1 and name not in OF_EACH_MODULE:
            shared[name] = len(crates)
    failed = False
    for what, found, limit in (
        ("functions return Result<_, String>", strings, STRING_ERRORS),
        ("public types share their name with another", shared, SHARED_NAMES),
        ("types have a word of attestation that another type has too", words, SHARED_WORDS),
    ):
        most = ", ".join(f"{name} {count}" for name, count in found.most_common(8) if count)
        print(f"{found.total()} {what}, {limit} are allowed{most and f'; most: {most}'}")
        failed |= found.total() > limit
    sys.exit(failed)


if __name__ == "__main__":
    main()
