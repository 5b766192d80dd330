#!/usr/bin/env bash
# Builds the four programs into target/dist: release, static, the same bytes wherever the checkout stands.
#
#   tools/build.sh [musl|gnu]      gnu builds into target/dist-gnu
#
# It fails when one of them is not static or larger than promised.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

libc=${1:-$(cat .deps/target 2>/dev/null || echo musl)}
case $libc in
musl) target=$MUSL; dist=target/dist ;;
gnu) target=$GNU; dist=target/dist-gnu ;;
*) die "unknown C library $libc: musl or gnu" ;;
esac
if [ "$libc" = "$(cat .deps/target 2>/dev/null)" ]; then dist=target/dist; fi

PROGRAMS="bootstrapper join-service key-service firstlight"
# SPECIFICATION.md promises it
BOOTSTRAPPER_LIMIT=$((6 << 20))

# a folder of its own: its flags are not those of `cargo build`, and the two must not undo each other's work
export CARGO_TARGET_DIR=$ROOT/target/release-build
export SOURCE_DATE_EPOCH=1
# paths of this machine that would end up in panic messages and debug sections
cargo_home=${CARGO_HOME:-$HOME/.cargo}
declare -A places=([$ROOT]=/firstlight [$cargo_home]=/cargo [$(rustc --print sysroot)]=/rust)
rust_flags='-C target-feature=+crt-static' c_flags=
for place in "${!places[@]}"; do
  rust_flags+=" --remap-path-prefix=$place=${places[$place]}"
  c_flags+=" -ffile-prefix-map=$place=${places[$place]}"
done
export RUSTFLAGS=$rust_flags "CFLAGS_${target//-/_}=$c_flags"

say "building for $target"
cargo build --release --locked --bins --target "$target"

mkdir -p "$dist"
for program in $PROGRAMS; do
  built=$CARGO_TARGET_DIR/$target/release/$program
  [ -e "$built" ] || die "there is no program $program in src/bin"
  if readelf -lW "$built" | grep -q INTERP || readelf -dW "$built" | grep -q NEEDED; then
    die "$program is not static"
  fi
  cmp -s "$built" "$dist/$program" || install -m 755 "$built" "$dist/$program"
  printf '%9d bytes  %s\n' "$(stat -c %s "$dist/$program")" "$dist/$program" >&2
done
size=$(stat -c %s "$dist/bootstrapper")
[ "$size" -le $BOOTSTRAPPER_LIMIT ] || die "bootstrapper has $size bytes, more than the promised $BOOTSTRAPPER_LIMIT"
