#!/usr/bin/env bash
# Fuzzes the parsers of hostile bytes with libFuzzer and the address sanitizer, on the stable toolchain.
#
#   tools/fuzz.sh [SECONDS] [TARGET..]      runs each target for SECONDS (60); without a TARGET, all of fuzz/src/bin
#   tools/fuzz.sh check                     checks that all of them compile
#   tools/fuzz.sh keep TARGET FILE..        adds inputs to fuzz/corpus/TARGET.tar.gz, from which every run starts
#
# The corpus in the cache grows with each run. The script fails when an input crashes a target, is too slow or takes too much
# memory, and prints the command that runs the target with that input again.
. "$(dirname "$0")/lib.sh"
cd "$ROOT/fuzz"
if [ "${1:-}" = check ]; then
  exec env CARGO_TARGET_DIR="$ROOT/target" cargo check --locked --quiet --target "$GNU"
fi
if [ "${1:-}" = keep ]; then
  [ $# -gt 2 ] || die "usage: tools/fuzz.sh keep TARGET FILE.."
  pack=corpus/$2.tar.gz inputs=$(mktemp -d); trap 'rm -rf "$inputs"' EXIT
  [ ! -e "$pack" ] || tar xzf "$pack" -C "$inputs"
  cp "${@:3}" "$inputs"
  (cd "$inputs" && tar c --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=644 --format=ustar -- *) | gzip -9n >"$pack"
  say "$pack has $(tar tzf "$pack" | wc -l) inputs"
  exit
fi
seconds=${1:-60}; shift || true
[[ $seconds =~ ^[0-9]+$ ]] || die "usage: tools/fuzz.sh [SECONDS] [TARGET..]"
if [ $# = 0 ]; then mapfile -t targets < <(basename -s .rs -a src/bin/*.rs); else targets=("$@"); fi

command -v g++ >/dev/null || die "libFuzzer is built from C++: apt-get install g++"
say "building ${#targets[@]} fuzz targets"
# the flags that `cargo fuzz` passes to a nightly compiler; the stable compiler supports all of them, with the sanitizer's runtime
flags="-Zsanitizer=address -Cpasses=sancov-module -Ccodegen-units=1 -Cforce-frame-pointers=yes"
for option in level=4 inline-8bit-counters pc-table trace-compares; do
  flags+=" -Cllvm-args=-sanitizer-coverage-$option"
done
RUSTC_BOOTSTRAP=1 RUSTFLAGS="$flags" CARGO_TARGET_DIR="$ROOT/fuzz/target" \
  cargo build --locked --quiet --release --target "$GNU" "${targets[@]/#/--bin=}"

failed=()
for target in "${targets[@]}"; do
  corpus=$CACHE/fuzz/$target findings=$ROOT/fuzz/artifacts/$target log=$ROOT/fuzz/target/$target.log
  program=$ROOT/fuzz/target/$GNU/release/$target
  mkdir -p "$corpus" "$findings"
  # Intel's own collateral has 40 kB
  max_len=16384
  case $target in tdx_collateral | carried) max_len=65536 ;; esac
  options=(-max_total_time="$seconds" "-max_len=$max_len" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -verbosity=1)
  options+=(-artifact_prefix="$findings/" "$corpus")
  if [ -e "corpus/$target.tar.gz" ]; then
    seeds=$ROOT/fuzz/target/corpus/$target
    rm -rf "$seeds" && mkdir -p "$seeds"
    tar xzf "corpus/$target.tar.gz" -C "$seeds"
    options+=("$seeds")
  fi
  status=0
  nice "$program" "${options[@]}" >"$log" 2>&1 || status=$?
  count=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  if [ $status = 0 ]; then
    printf '%-14s %9s executions, no finding\n' "$target" "$count"
    continue
  fi
  failed+=("$target")
  printf '%-14s FINDING\n' "$target"
  grep -m1 -A3 'panicked at\|ERROR: \|runtime error' "$log" | sed 's/^/    /' || tail -n 20 "$log"
  sed -n "s|.*Test unit written to |    again: $program |p" "$log"
done
[ ${#failed[@]} = 0 ] || die "findings in: ${failed[*]} (logs: fuzz/target/*.log)"
