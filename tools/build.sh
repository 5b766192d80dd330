#!/usr/bin/env bash
# Builds the four programs, static and stripped, into target/dist, and checks what SPECIFICATION.md promises of them.
#
#   tools/build.sh [musl|gnu]     gnu, a static glibc, goes to target/dist-gnu
#
# The bytes depend on the sources, the lock file, the compilers and the standard library, and on no path: DIST and
# CARGO_TARGET_DIR may be anywhere.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

PROGRAMS=(bootstrapper join-service key-service firstlight)
BOOTSTRAPPER_MAX=$((6 << 20))

# a folder of its own: the flags are not those of `cargo build`, and neither is to undo the other's work
out=${CARGO_TARGET_DIR:-$ROOT/target/release-build}
dist=${DIST:-$ROOT/target/dist}
libc=${1:-musl}
case $libc in
musl)
  target=$MUSL
  if ! target_works "$MUSL"; then
    say "no standard library for $MUSL: building against a static glibc instead"
    libc=gnu target=$GNU
  fi
  ;;
gnu) target=$GNU dist=$dist-gnu ;;
*) die "unknown C library $libc: musl or gnu" ;;
esac
link_tss "$libc"

home=${CARGO_HOME:-$HOME/.cargo}
# paths of this machine that would end up in panic messages and debug sections
places=("$out=/target" "$ROOT=/firstlight" "$home=/cargo" "$(rustc --print sysroot)=/rust")
CARGO_ENCODED_RUSTFLAGS=$(IFS=$'\x1f'; flags=(-Ctarget-feature=+crt-static "${places[@]/#/--remap-path-prefix=}"); echo "${flags[*]}")
export CARGO_TARGET_DIR=$out CARGO_ENCODED_RUSTFLAGS "CFLAGS_${target//-/_}=${places[*]/#/-ffile-prefix-map=}"
export SOURCE_DATE_EPOCH=1 CARGO_INCREMENTAL=0

say "building ${PROGRAMS[*]} for $target"
cargo build --locked --release --target "$target" --package firstlight --bins
mkdir -p "$dist"
for program in "${PROGRAMS[@]}"; do
  built=$out/$target/release/$program
  [ -e "$built" ] || die "there is no program $program in src/bin"
  if readelf -lW "$built" | grep -q INTERP; then die "$program has an interpreter"; fi
  if readelf -dW "$built" 2>/dev/null | grep -q NEEDED; then die "$program needs a shared library"; fi
  cmp -s "$built" "$dist/$program" || install -m755 "$built" "$dist/$program"
  printf '%9d bytes  static  %s\n' "$(stat -c %s "$dist/$program")" "$program" >&2
done
size=$(stat -c %s "$dist/bootstrapper")
[ "$size" -le $BOOTSTRAPPER_MAX ] || die "bootstrapper has $size bytes, more than the promised $BOOTSTRAPPER_MAX"
