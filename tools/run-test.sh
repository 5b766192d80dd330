#!/usr/bin/env bash
# Cargo starts each test program with this (.cargo/config.toml): the program gets a folder of its own for temporary files, which goes
# when the program has ended. Tests share API servers and key hierarchies that live until then, and a test that is killed removes
# nothing.
set -euo pipefail
TMPDIR=$(mktemp -d -t firstlight.XXXXXX)
export TMPDIR
# programs that a test starts as other users find what is theirs in it
chmod 711 "$TMPDIR"
trap 'rm -rf "$TMPDIR"' EXIT
status=0
"$@" || status=$?
exit "$status"
