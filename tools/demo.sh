#!/usr/bin/env bash
# Builds the six programs and the demo's machine, and runs the demo.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

demo=(--locked --package machine --bin demo)
say "building the six programs and the demo: some minutes the first time"
start=$SECONDS
cargo build --quiet "${demo[@]}" &
tools/build.sh
wait $! || die "the demo cannot be built"
say "built in $((SECONDS - start)) s"
tools/accel.sh >/dev/null
cargo run --quiet "${demo[@]}"
