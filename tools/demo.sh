#!/usr/bin/env bash
# Builds the programs and the demo's machine, and runs the demo. The programs are not optimized as a whole, as those of `make build` are:
# that takes longer than the demo itself.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

target=$MUSL
target_works "$target" || target=$GNU
export CARGO_TARGET_DIR=$ROOT/target/demo RUSTFLAGS=-Ctarget-feature=+crt-static CARGO_INCREMENTAL=0
say "building the programs and the demo: some minutes the first time"
start=$SECONDS
cargo build --quiet --locked --profile quick --target "$target" --bin={unlock,bootstrapper,join-service,key-service,firstlight,demo}
say "built in $((SECONDS - start)) s"
tools/accel.sh >/dev/null
programs=$CARGO_TARGET_DIR/$target/quick
FIRSTLIGHT_PROGRAMS=$programs "$programs/demo"
