#!/usr/bin/env bash
# Builds the four programs, static and stripped, into target/dist, and checks what SPECIFICATION.md promises of them.
#
#   tools/build.sh [TARGET]     x86_64-unknown-linux-musl, or x86_64-unknown-linux-gnu (a static glibc)
#
# The bytes depend on the sources, the lock file, the compilers and the standard library, and on no path: DIST and
# CARGO_TARGET_DIR may be anywhere.
. "$(dirname "$0")/lib.sh"

PROGRAMS=(bootstrapper join-service key-service firstlight)
BOOTSTRAPPER_MAX=$((6 << 20))

target=${1:-$MUSL}
if [ "$target" = "$MUSL" ] && ! target_works "$MUSL"; then
  target=$GNU
  say "no standard library for $MUSL: building a static $GNU instead"
fi
libc=${target##*-}
case $target in "$MUSL" | "$GNU") ;; *) die "unknown target $target" ;; esac
mkdir -p "$ROOT/.deps"
ln -sfn "$("$ROOT/tools/tss.sh" "$libc")" "$ROOT/.deps/$libc"

cd "$ROOT"
out=${CARGO_TARGET_DIR:-$ROOT/target}
dist=${DIST:-$out/dist}
[ "$target" = "$MUSL" ] || dist=$dist-$libc
home=${CARGO_HOME:-$HOME/.cargo}
remap() { printf '%s' "$1=$2"; }
flags=(-Ctarget-feature=+crt-static
  "--remap-path-prefix=$(remap "$out" /target)" "--remap-path-prefix=$(remap "$ROOT" /firstlight)"
  "--remap-path-prefix=$(remap "$home" /cargo)" "--remap-path-prefix=$(remap "$(rustc --print sysroot)" /rust)")
export CARGO_ENCODED_RUSTFLAGS
CARGO_ENCODED_RUSTFLAGS=$(IFS=$'\x1f'; echo "${flags[*]}")
export "CFLAGS_${target//-/_}=-ffile-prefix-map=$out=/target -ffile-prefix-map=$home=/cargo -ffile-prefix-map=$ROOT=/firstlight"
export SOURCE_DATE_EPOCH=1 CARGO_INCREMENTAL=0

say "building ${PROGRAMS[*]} for $target"
cargo build --locked --release --target "$target" --bins
mkdir -p "$dist"
for program in "${PROGRAMS[@]}"; do
  install -m755 "$out/$target/release/$program" "$dist/$program"
  if readelf -lW "$dist/$program" | grep -q INTERP; then die "$program has an interpreter"; fi
  if readelf -dW "$dist/$program" 2>/dev/null | grep -q NEEDED; then die "$program needs a shared library"; fi
  printf '%9d bytes  static  %s\n' "$(stat -c %s "$dist/$program")" "$program"
done
size=$(stat -c %s "$dist/bootstrapper")
[ "$size" -le $BOOTSTRAPPER_MAX ] || die "bootstrapper has $size bytes, more than the promised $BOOTSTRAPPER_MAX"
