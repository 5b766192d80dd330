#!/usr/bin/env bash
# Builds what the demo runs, the five programs and the machine around them, and runs it.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

demo=(--locked --package machine --bin demo)
say "building the five programs, and beside them the demo: some minutes the first time"
start=$SECONDS
cargo build --quiet "${demo[@]}" &
tools/build.sh
wait $! || die "the demo cannot be built"
say "built in $((SECONDS - start)) s"
tools/accel.sh >/dev/null
cargo run --quiet "${demo[@]}"
