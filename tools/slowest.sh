#!/usr/bin/env bash
# Runs tests with Cargo, and prints at the end which ten test programs took longest.
#
#   tools/slowest.sh cargo test --locked
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
"$@" 2>&1 | tee "$log" || status=$?
say "the slowest test programs, in seconds:"
# "Running tests/cli.rs (target/...)" precedes "test result: ok. 12 passed; ... finished in 3.21s"
awk '$1 == "Running" || $1 == "Doc-tests" { name = $1 == "Running" && $2 == "unittests" ? $3 " " $4 : $2 }
  /^test result:/ { seconds = $NF; sub(/s$/, "", seconds); printf "%9.1f  %s\n", seconds, name }' "$log" |
  sed -E 's/ \(.*\/([^/]*)-[0-9a-f]+\)$/ of \1/' | sort -rn | head -n 10 >&2
exit $status
