#!/usr/bin/env bash
# Builds the seven programs, static and stripped, into target/dist, and checks SPECIFICATION.md's promises of them.
#
#   tools/build.sh [musl|gnu]     gnu, a static glibc, goes to target/dist-gnu
#
# The bytes depend on the sources, the lock file, the compilers and the standard library, and on no path: DIST and
# CARGO_TARGET_DIR may be anywhere.
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

TOGETHER=(bootstrapper join-service key-service member-controller firstlight)
PROGRAMS=(unlock firstlight-volume "${TOGETHER[@]}")
# maximum bytes with musl, as SPECIFICATION.md promises; a static glibc adds 0.9 MB
declare -A MOST=([unlock]=2695000 [firstlight-volume]=2065000 [bootstrapper]=6110000 [join-service]=5440000 [key-service]=4900000 [member-controller]=5250000 [firstlight]=8940000)
UNLOCK_MOST_COMPRESSED=1242000 UNLOCK_MOST_OURS=632000

# a separate folder: the flags differ from those of `cargo build`, and neither build may invalidate the other
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

home=${CARGO_HOME:-$HOME/.cargo}
# without these flags, panic messages and debug sections would contain paths of this machine
sysroot=$(rustc --print sysroot)
places=("$out=/target" "$ROOT=/firstlight" "$home=/cargo" "$sysroot=/rust")
# the compiler names the files of the standard library so if it does not find them; with the component rust-src it finds them
places+=("$sysroot/lib/rustlib/src/rust=/rustc/$(rustc --version --verbose | sed -n 's/^commit-hash: //p')")
# packed relocations: those of a position-independent program then take 4 KB in place of 270 KB (musl reads them since 1.2.4, glibc
# since 2.36)
CARGO_ENCODED_RUSTFLAGS=$(IFS=$'\x1f'; flags=(-Ctarget-feature=+crt-static "-Clink-arg=-Wl,-z,pack-relative-relocs" "${places[@]/#/--remap-path-prefix=}"); echo "${flags[*]}")
export CARGO_TARGET_DIR=$out CARGO_ENCODED_RUSTFLAGS "CFLAGS_${target//-/_}=${places[*]/#/-ffile-prefix-map=}"
export SOURCE_DATE_EPOCH=1 CARGO_INCREMENTAL=0
# `--version` of each program shows the commit, so each commit changes the measurements of a node
FIRSTLIGHT_COMMIT=$(source_commit)
if [ -n "$FIRSTLIGHT_COMMIT" ]; then export FIRSTLIGHT_COMMIT; else unset FIRSTLIGHT_COMMIT; fi

say "building ${PROGRAMS[*]} for $target"
# unlock and firstlight-volume have calls of their own. In one call with the other programs, Cargo would give their rustls a feature that
# only an HTTPS client needs: the logging of handshakes
# They make a few connections in a boot, so rustls is optimized for size there, and for speed in the services
cargo build --locked --release --target "$target" --package firstlight-unlock --config 'profile.release.package.rustls.opt-level="z"'
cargo build --locked --release --target "$target" --package firstlight-volume --config 'profile.release.package.rustls.opt-level="z"'
# one call for the others, because it links two programs at once; tools/check-deps.sh checks that no program gets features of another
cargo build --locked --release --target "$target" "${TOGETHER[@]/#/--bin=}"
mkdir -p "$dist"
for program in "${PROGRAMS[@]}"; do
  built=$out/$target/release/$program
  if readelf -lW "$built" | grep -q INTERP; then die "$program has an interpreter"; fi
  if readelf -dW "$built" 2>/dev/null | grep -q NEEDED; then die "$program needs a shared library"; fi
  strip -o "$dist/.$program" "$built"
  if cmp -s "$dist/.$program" "$dist/$program"; then rm "$dist/.$program"; else mv "$dist/.$program" "$dist/$program"; fi
  printf '%9d bytes  static  %s\n' "$(stat -c %s "$dist/$program")" "$program" >&2
done
[ "$libc" = musl ] || exit 0
for program in "${!MOST[@]}"; do
  size=$(stat -c %s "$dist/$program")
  [ "$size" -le "${MOST[$program]}" ] || die "$program has $size bytes, more than the promised ${MOST[$program]}"
done
compressed=$(zstd -19 --stdout "$dist/unlock" | wc -c)
printf '%9d bytes  unlock by zstd -19, as initramfs has it\n' "$compressed" >&2
[ "$compressed" -le $UNLOCK_MOST_COMPRESSED ] || die "unlock has $compressed bytes compressed, more than the promised $UNLOCK_MOST_COMPRESSED"
# a machine that only builds may have no Python
command -v python3 >/dev/null || exit 0
ours=$(python3 tools/sizes.py --ours "$out/$target/release/unlock")
printf '%9d bytes  our own code in unlock\n' "$ours" >&2
[ "$ours" -le $UNLOCK_MOST_OURS ] || die "unlock has $ours bytes of our own code, more than the promised $UNLOCK_MOST_OURS: tools/sizes.py has those of each crate"
